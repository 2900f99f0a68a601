"""Which process gets which devices: leases from Ray, asked for by kind and number.

The learner is placed first, so that on a TPU host it gets the first, contiguous chips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.devices import environment
from configs.schema import Plan

RESOURCE = {"cpu": "CPU", "tpu": "TPU", "gpu": "GPU"}


@dataclass(frozen=True)
class Lease:
    """What one process asks Ray for.

    Attributes:
        resources: amounts by Ray's names.
        variables: environment of the process.
    """

    resources: Mapping[str, float]
    variables: Mapping[str, str]


def lease(plan: Plan, devices: int) -> Lease:
    """A process with `devices` devices of the plan's kind.

    CPU devices are virtual: however many, they share one of Ray's CPUs.
    """
    amount = 1 if plan.platform == "cpu" else devices
    return Lease(
        resources={RESOURCE[plan.platform]: amount},
        variables=environment(platform=plan.platform, count=devices),
    )


def light() -> Lease:
    """A process without devices; it works while the others wait, so it reserves nothing."""
    return Lease(resources={}, variables={"JAX_PLATFORMS": "cpu"})


def needed(plan: Plan, *, learner: bool = True) -> dict[str, float]:
    """Everything the plan's processes lease together; without a learner its samplers alone."""
    name = RESOURCE[plan.platform]
    total = plan.num_samplers * lease(plan, plan.devices_per_sampler).resources[name]
    if learner and plan.placement == "split":
        total += lease(plan, plan.learner_devices).resources[name]
    return {name: total}


def shortage(plan: Plan, total: Mapping[str, float], *, learner: bool = True) -> str | None:
    """Why a cluster with these resources can never hold the plan; None: it can."""
    for name, amount in needed(plan, learner=learner).items():
        if total.get(name, 0.0) < amount:
            return (
                f"plan.platform = {plan.platform!r} needs {amount:g} {name} in the cluster, which "
                f"has {total.get(name, 0.0):g}; nothing else is taken instead"
            )
    return None
