"""The v5e-8 presets as planner input."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from configs.load import load_config, presets
from configs.schema import Config
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.hardware import topology_of
from pipeline.plan.search.fitting import PlacementChoice, PlanCase, choose_placement

PROJECT = Path(__file__).parents[3]
_NEVER = ("_270m_cpu.toml", "_270m_gpu.toml", "minimal.toml")
KNOWN = [name for name in presets() if not name.endswith(_NEVER)]
"""The presets whose model needs not be fetched before it can be planned for, and with devices."""
FREE = (
    ("plan.slots", "none"),
    ("plan.slot_buckets", "none"),
    ("plan.micro_batch_tokens", "none"),
)
"""Settings that leave the sizes to the planner."""
AUTO = (*FREE, ("plan.placement", "auto"))
"""The same for the placement."""
_COLOCATED = {
    "plan.placement": "colocated",
    "plan.remat": "full",
    "plan.micro_batch_tokens": "16384",
}
_OWN = {
    "gemma3_270m": ("1024", "64"),
    "gemma3_1b": ("512", "32"),
    "gemma3_4b": ("128", "16"),
    "gemma2_2b": ("256", "16"),
    "gemma4_e2b": ("512", "32"),
    "gemma4_e4b": ("128", "16"),
}
"""Slots, and prompts of a step, by model."""


def preset(model: str, *overrides: tuple[str, str]) -> Config:
    """The preset of `model`, such as gemma3_1b, with overrides.

    By default it is colocated with given sizes, a copy of the base on each chip, remat "full",
    and prompts that fill the slots of a v5e-8 once.
    """
    own = dict(zip(("plan.slots", "rollout.prompts_per_step"), _OWN[model], strict=True))
    settings = _COLOCATED | own | dict(overrides)
    return load_config(PROJECT / "configs" / f"{model}_gsm8k_v5e8.toml", tuple(settings.items()))


def case(config: Config, topology: str | None = None) -> PlanCase:
    """The planner's input for a configuration."""
    return PlanCase(config, shape_of(config), topology_of(config, topology))


@cache
def choice(model: str, *overrides: tuple[str, str], topology: str | None = None) -> PlacementChoice:
    """What the planner chooses for a preset; planned once for all tests of a process."""
    return choose_placement(case(preset(model, *overrides), topology))
