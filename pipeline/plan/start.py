"""With which sizes a process begins: what is given, what a run had, or else what is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema import Config
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Lengths
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.plan.cost_model.hardware import topology_of
from pipeline.plan.search.search import Case, planned_sizes


def case_of(config: Config) -> Case:
    """What a run of this configuration is planned for.

    Raises:
        FileNotFoundError: if the model's folder is not there.
        ValueError: if it is not known what its devices hold.
    """
    if config.plan.platform == "gpu":
        raise ValueError(
            'plan.platform = "gpu": how much such a device holds is not known before it is opened; '
            "set plan.slots and plan.micro_batch_tokens, the most that may be used"
        )
    lengths = Lengths.expected(config)
    return Case(config, shape_of(config), topology_of(config, None), lengths)


def first_sizes(config: Config, recorded: Mapping[str, Any] | None) -> Sizes:
    """Those of a run that goes on; those that are given, if both are; else what is planned.

    Raises:
        FileNotFoundError: if a plan is needed, and the model's folder is not there.
        ValueError: if a plan is needed, and nothing fits or nothing is known of the devices.
    """
    plan = config.plan
    found = None if plan.fixed else recorded
    if found is not None:
        return Sizes.of_json(found["at_checkpoint"] or found["in_force"])
    if plan.slots is not None and plan.micro_batch_tokens is not None:
        return Sizes.of(config)
    return planned_sizes(case_of(config))
