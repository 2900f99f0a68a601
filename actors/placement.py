"""Which process gets which devices: leases from Ray, asked for by kind and number.

All processes of a command get their devices together or not at all, so that two commands that wait
for the same devices never hold half of them each. The learner comes first, so that on a TPU host it
gets the first, contiguous chips: Ray gives chips in the order of a placement group's bundles.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.schema import Plan
from pipeline.compute.devices import environment

cluster_is_gone = threading.Event()
"""Set when the cluster has ended before this process: nobody answers, and nothing is given back."""
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


class Reservation:
    """The devices of all processes of a command, as a placement group with a bundle for each.

    It ends with this process if it is not released before.

    Args:
        name: shown to other commands that wait for these devices.
        leases: of the processes, the learner's first.

    Attributes:
        group: the placement group; it may have to wait for devices.
    """

    def __init__(self, name: str, leases: Sequence[Lease]) -> None:
        bundles = [dict(one.resources) for one in leases]
        self.group: PlacementGroup = placement_group(bundles, strategy="PACK", name=name)

    def bundle(self, number: int) -> PlacementGroupSchedulingStrategy:
        """What puts an actor where the devices of process `number` are."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)

    async def placed(self) -> None:
        """Returns when all devices are reserved."""
        await self.group.ready()

    def release(self) -> None:
        """Gives the devices back, and ends actors that still have them."""
        if not cluster_is_gone.is_set():
            remove_placement_group(self.group)


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
