"""The sizes that a run begins with: those it was given, or those that are planned for it."""

from __future__ import annotations

from configs.schema import Config
from pipeline.plan.hardware import topology_of
from pipeline.plan.search import Case, planned_sizes
from pipeline.plan.shapes import shape_of
from pipeline.plan.sizes import Sizes, sized
from pipeline.plan.workload import Lengths


def starting_sizes(config: Config) -> Sizes:
    """As configured with `plan.fixed = true`, else planned within what is configured.

    A function of the configuration and, on CPUs, of this machine's memory and cores; estimated.

    Raises:
        FileNotFoundError: if the model's folder is not there.
        ValueError: if no sizes fit, or nothing tells what they have to fit into.
    """
    if config.plan.fixed:
        return Sizes.of(config)
    if config.plan.platform == "gpu":
        raise ValueError(
            "plan.fixed = false: sizes are planned for CPUs and TPUs, of a GPU nothing here tells "
            "the memory; nearest valid: true, with plan.rollout_rows and plan.micro_batch_tokens "
            "as `launch.plan --topology gpu-80` finds them"
        )
    topology = topology_of(config, None)
    case = Case(config, shape_of(config), topology, Lengths.expected(config))
    return planned_sizes(case)


def with_sizes(config: Config) -> Config:
    """The configuration as those need it who do the work; errors as `starting_sizes`."""
    return config if config.plan.fixed else sized(config, starting_sizes(config))
