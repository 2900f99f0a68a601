"""Device placement: which process gets which devices, as leases from Ray by kind and number.

All processes of a command get their devices together or not at all, so that two commands that wait
for the same devices never hold half of them each. The learner comes first, so that on a TPU host it
gets the first, contiguous chips: Ray assigns chips in the order of a placement group's bundles.
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
"""Set if the cluster ends before this process: calls get no answer, devices need no release."""
_POLL_S = 0.5
RESOURCE = {"cpu": "CPU", "tpu": "TPU", "gpu": "GPU"}


@dataclass(frozen=True)
class Lease:
    """Resources and environment of one process.

    Attributes:
        resources: amounts by Ray's resource names.
        variables: environment of the process.
    """

    resources: Mapping[str, float]
    variables: Mapping[str, str]


class Reservation:
    """The devices of all processes of a command, as a placement group with a bundle for each.

    Ray removes it when this process ends, if it was not released before.

    Args:
        name: shown to other commands that wait for these devices.
        leases: one per process, the learner's first.

    Attributes:
        group: the placement group, which may be waiting for devices.
    """

    def __init__(self, name: str, leases: Sequence[Lease]) -> None:
        bundles = [dict(one.resources) for one in leases]
        self.group: PlacementGroup = placement_group(bundles, strategy="PACK", name=name)

    def bundle(self, number: int) -> PlacementGroupSchedulingStrategy:
        """Scheduling strategy that places an actor on the devices of process `number`."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)

    async def placed(self) -> None:
        """Returns when all devices are reserved."""
        await self.group.ready()

    def release(self) -> None:
        """Releases the devices; actors that still hold them are ended."""
        # In a thread: without its GCS, Ray would wait for a minute, and then end this process.
        work = threading.Thread(target=remove_placement_group, args=(self.group,), daemon=True)
        if not cluster_is_gone.is_set():
            work.start()
        while work.is_alive() and not cluster_is_gone.is_set():
            work.join(_POLL_S)


def lease(plan: Plan, devices: int) -> Lease:
    """Returns the lease of a process with `devices` devices of the plan's kind.

    CPU devices are virtual: all of a process's devices share one of Ray's CPUs.
    """
    amount = 1 if plan.platform == "cpu" else devices
    return Lease(
        resources={RESOURCE[plan.platform]: amount},
        variables=environment(platform=plan.platform, count=devices),
    )


def device_free_lease() -> Lease:
    """Returns the lease of a process without devices, which reserves no CPU either.

    Reward processes work while the others wait.
    """
    return Lease(resources={}, variables={"JAX_PLATFORMS": "cpu"})


def total_resources(plan: Plan, *, learner: bool = True) -> dict[str, float]:
    """Returns the total resources of the plan's processes; without a learner, of its samplers."""
    name = RESOURCE[plan.platform]
    total = plan.num_samplers * lease(plan, plan.devices_per_sampler).resources[name]
    if learner and plan.placement == "split":
        total += lease(plan, plan.learner_devices).resources[name]
    return {name: total}


def shortage(plan: Plan, total: Mapping[str, float], *, learner: bool = True) -> str | None:
    """Returns why a cluster with these resources can never hold the plan; None if it can."""
    for name, amount in total_resources(plan, learner=learner).items():
        if total.get(name, 0.0) < amount:
            return (
                f"plan.platform = {plan.platform!r} needs {amount:g} {name} in the cluster, which "
                f"has {total.get(name, 0.0):g}; no other kind of device is used instead"
            )
    return None
