"""Settings of Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import ConfigDict, Field

from configs.base import FREE, Problem, Table, Text


class Wandb(Table):
    """Weights & Biases."""

    model_config = ConfigDict(json_schema_extra=FREE)

    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto",
        description="auto: online if logged in, else offline; online: refuse to start if not "
        "logged in",
    )
    project: str = Field("gemma-grpo", min_length=1, description="W&B project")
    entity: Text | None = Field(
        None, description="W&B entity (team or user); default: the default entity of the login"
    )
    table_every: int = Field(
        10,
        ge=0,
        description="steps between two tables of rollouts; the first GRPO step has one, too; "
        "0: no tables",
    )

    def conflicts(self) -> Iterator[Problem]:
        """Every setting has an effect."""
        if self.mode == "disabled":
            others = [key for key in type(self).model_fields if key != "mode"]
            yield from self.unused(*others, why='with wandb.mode = "disabled"')
