"""The v5e-8 presets as planner input."""

from __future__ import annotations

from pathlib import Path

from configs.load import load_config
from configs.schema import Config
from pipeline.contracts.speeds import Lengths
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.plan.cost_model.hardware import topology_of
from pipeline.plan.search.fitting import PlanCase

PROJECT = Path(__file__).parents[3]
FREE = (
    ("plan.fixed", "false"),
    ("plan.slots", "none"),
    ("plan.micro_batch_tokens", "none"),
)
"""Settings that leave the sizes to the planner."""


def preset(model: str, *overrides: tuple[str, str]) -> Config:
    """The preset of `model`, such as gemma3_1b, with overrides.

    By default sizes are fixed and `plan.remat` is "full".
    """
    settings = {"plan.fixed": "true", "plan.remat": "full"} | dict(overrides)
    return load_config(PROJECT / "configs" / f"{model}_gsm8k_v5e8.toml", tuple(settings.items()))


def case(config: Config, topology: str | None = None) -> PlanCase:
    """The planner's input for a configuration."""
    return PlanCase(
        config, shape_of(config), topology_of(config, topology), Lengths.expected(config)
    )
