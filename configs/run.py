"""Settings of the run itself: name, folder and phases, checkpoints, records, profiles, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from configs.base import (
    FREE,
    FolderPath,
    MirrorURL,
    OutputPath,
    Problem,
    Slug,
    Table,
)


class Run(Table):
    """Name, folder, seed and phases of the run."""

    name: Slug = Field(
        # File systems limit folder names to 255 bytes.
        max_length=200,
        description="name of the run; its folder is DIR/NAME",
        json_schema_extra={"implied": "the name of the file"},
    )
    dir: OutputPath = Field(
        "runs",
        validate_default=True,
        description="parent folder of the run folders",
        json_schema_extra=FREE,
    )
    mirror: MirrorURL | None = Field(
        None,
        description="where the run folder is copied in the background, as MIRROR/NAME: a URL such "
        "as s3://bucket/runs, gs://bucket/runs or hf://buckets/user/name, or an existing folder on "
        "another disk; a host without the run folder resumes from there; keys and passwords are "
        "read from the environment",
        json_schema_extra=FREE,
    )
    tpu_chips: int | None = Field(
        None,
        ge=1,
        description="number of TPU chips of this host, where Ray's count of its device files is "
        "wrong; for a private cluster",
        json_schema_extra=FREE,
    )
    fork: FolderPath | None = Field(
        None,
        description="RUN_DIR, RUN_DIR@STEP, RUN_DIR@best or RUN_DIR@last: begin from this "
        "checkpoint of another run, with its optimizer state; other settings may differ but for "
        "the base and the shape of the adapter",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**32 - 1,
        description="random seed of data order, adapter initialization and sampling",
    )
    phases: Annotated[tuple[Literal["sft", "grpo"], ...], Field(strict=False)] = Field(
        ("grpo",),
        description='training phases in order: ["grpo"], or with an SFT phase ["sft", "grpo"]',
    )

    def conflicts(self) -> Iterator[Problem]:
        """GRPO is the last phase; a fork has the optimizer's state of GRPO."""
        if self.phases not in {("grpo",), ("sft", "grpo")}:
            yield "phases", 'nearest valid: ["grpo"] or ["sft", "grpo"]'
        if self.fork is not None and self.has_sft_phase:
            yield "fork", 'goes with phases = ["grpo"] only'

    @property
    def has_sft_phase(self) -> bool:
        """Whether an SFT phase precedes GRPO."""
        return "sft" in self.phases


class Checkpoint(Table):
    """Checkpoints of the learner's state."""

    model_config = ConfigDict(json_schema_extra=FREE)

    every_steps: int = Field(10, ge=1, description="most steps between two checkpoints")
    every_s: float = Field(
        120.0,
        gt=0,
        description="seconds after which a checkpoint is written though fewer steps are done: a "
        "death costs at most so much work, and a step",
    )
    keep: int = Field(
        2,
        ge=1,
        description="number of newest checkpoints to keep, besides that of the best version; older "
        "ones are deleted",
    )
    keep_every: int | None = Field(
        None, ge=1, description="also keep checkpoints of steps that are multiples of this number"
    )


class Records(Table):
    """Additional records in the run folder."""

    model_config = ConfigDict(json_schema_extra=FREE)

    tokens: bool = Field(False, description="also write token ids and log-probs of every rollout")


class Profile(Table):
    """Profiles of training steps in the folder `profile/` of the run."""

    model_config = ConfigDict(json_schema_extra=FREE)

    steps: Annotated[str, Field(pattern=r"^[1-9][0-9]*(-[1-9][0-9]*)?$")] | None = Field(
        None,
        description="training steps to profile, counted from 1, e.g. 3-5: learner and samplers "
        "write JAX profiler traces",
        json_schema_extra={"words": 'of a step or two, e.g. "3-5"'},
    )

    def conflicts(self) -> Iterator[Problem]:
        """The steps ascend."""
        first, last = self.range or (0, 0)
        if last < first:
            yield "steps", f'must ascend; nearest valid: "{last}-{first}"'

    @property
    def range(self) -> tuple[int, int] | None:
        """The first and the last step; None: no profile."""
        if self.steps is None:
            return None
        first, _, last = self.steps.partition("-")
        return int(first), int(last or first)


class Faults(Table):
    """Restarts of a run whose process, or one of its processes, dies or hangs."""

    model_config = ConfigDict(json_schema_extra=FREE)

    restarts: int = Field(
        3,
        ge=0,
        description="restarts of the run without a new training step in between; one more death or "
        "hang ends it",
    )
    stuck_s: float | None = Field(
        None,
        ge=5.0,
        description="seconds without progress (a step, a segment, a micro-batch, a call of a "
        "reward) after which the run is ended and started again; at least 1800 while it loads, "
        "compiles or writes files. Default: the largest of 300, ten times the longest step and "
        "twice the time limit of a reward",
    )
