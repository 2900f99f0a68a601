"""Device placement: which process gets which devices, as leases from Ray by kind and number.

All processes of a command get their devices together or not at all, so that two commands that wait
for the same devices never hold half of them each. The learner comes first, so that on a TPU host it
gets the first, contiguous chips: Ray assigns chips in the order of a placement group's bundles.
In a cluster of several nodes the learner is on the node of this process, samplers on the others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.schema import Plan
from pipeline.compute.devices import environment
from pipeline.protocols import WorkerDied

_POLL_S = 5.0
RESOURCE = {"cpu": "CPU", "tpu": "TPU", "gpu": "GPU"}
NODE_LABEL = "ray.io/node-id"
"""Ray's label of each node."""
_DIGITS = 12
"""Digits of a node's id that are shown."""


@dataclass(frozen=True)
class Lease:
    """Resources of one process, by Ray's names, and its environment."""

    resources: Mapping[str, float]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive: Ray's id, names, total amounts by Ray's resources."""

    ident: str
    host: str
    address: str
    resources: Mapping[str, float]

    def __str__(self) -> str:
        return f"node {self.address} (host {self.host}, id {self.ident[:_DIGITS]})"


def alive_nodes() -> list[Node]:
    """The nodes of the cluster, first that of this process."""
    own = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            node["NodeID"],
            node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.ident != own, node.ident))


def assign(
    amounts: Sequence[float], rooms: Mapping[str, float], *, learner: bool
) -> list[str] | None:
    """Chooses a node for each process, which needs its devices on one node.

    The learner is on the first node, whose disk has the run folder; samplers are spread over the
    others, and the rest of them is on the first node, too. Without a learner that node comes first.

    `amounts` are the devices of each process, the learner's first; `rooms` those of each node,
    first that of this process.

    Returns:
        A key of `rooms` for each process; None if there is no room for all.
    """
    left, (home, *others) = dict(rooms), rooms
    found = []
    for number, amount in enumerate(amounts):
        spread = sorted(others, key=lambda node: -left[node])
        order = [*spread, home] if learner else [home, *spread]
        if learner and number == 0:
            order = [home]
        node = next((node for node in order if left[node] >= amount), None)
        if node is None:
            return None
        left[node] -= amount
        found.append(node)
    return found


class Reservation:
    """The devices of all processes of a command, as a placement group with a bundle for each.

    Ray removes it when this process ends, if it was not released before.

    `name` is shown to other commands that wait for these devices; `leases` has one for each
    process, the learner's first. `group` may be waiting for devices; `amount` is that of all.
    """

    def __init__(self, name: str, leases: Sequence[Lease], *, learner: bool = True) -> None:
        resource = self.resource = next(iter(leases[0].resources))
        amounts = [one.resources[resource] for one in leases]
        self.amount = sum(amounts)
        nodes, found = alive_nodes(), available_resources_per_node()
        home = nodes[0].ident
        totals = {node.ident: node.resources.get(resource, 0.0) for node in nodes}
        self._nodes = frozenset(totals)
        free = {node.ident: found.get(node.ident, {}).get(resource, 0.0) for node in nodes}
        placed = (
            assign(amounts, free, learner=learner)
            or assign(amounts, totals, learner=learner)
            or [home] * len(leases)
        )
        self.group: PlacementGroup = placement_group(
            [dict(one.resources) for one in leases],
            strategy="PACK" if set(placed) == {home} else "SPREAD",
            name=name,
            bundle_label_selector=[
                {NODE_LABEL: home if node == home else f"!{home}"} for node in placed
            ],
        )

    def strategy(self, number: int) -> PlacementGroupSchedulingStrategy:
        """Ray's scheduling strategy that places process `number` on its devices."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)

    async def placed(self) -> None:
        """Returns when all devices are reserved.

        Raises:
            WorkerDied: if a node has ended: the devices must be chosen among the others.
        """
        ready = asyncio.ensure_future(self.group.ready())
        try:
            while not (await asyncio.wait({ready}, timeout=_POLL_S))[0]:
                if not self._nodes <= {node.ident for node in alive_nodes()}:
                    raise WorkerDied("devices", "a node of the cluster is gone")
            ready.result()
        finally:
            ready.cancel()

    def release(self) -> None:
        """Releases the devices; actors that still hold them are ended."""
        remove_placement_group(self.group)


def lease(plan: Plan, devices: int) -> Lease:
    """Returns the lease of a process with `devices` devices of the plan's kind.

    CPU devices are virtual: all of a process's devices share one of Ray's CPUs.
    """
    amount = 1 if plan.platform == "cpu" else devices
    return Lease(
        resources={RESOURCE[plan.platform]: amount},
        variables=environment(platform=plan.platform, count=devices),
    )


NO_DEVICES = Lease(resources={}, variables={"JAX_PLATFORMS": "cpu"})
"""Of a process that reserves no CPU either: reward processes work while the others wait."""


def _amounts(plan: Plan, *, learner: bool) -> tuple[str, list[float]]:
    """Ray's name of the plan's devices, and the amount of each process, the learner's first."""
    name = RESOURCE[plan.platform]
    devices = [plan.devices_per_sampler] * plan.num_samplers
    if learner and plan.placement == "split":
        devices = [plan.learner_devices, *devices]
    return name, [lease(plan, count).resources[name] for count in devices]


def total_resources(plan: Plan, *, learner: bool = True) -> dict[str, float]:
    """Returns the total resources of the plan's processes; without a learner, of its samplers."""
    name, amounts = _amounts(plan, learner=learner)
    return {name: sum(amounts)}


def detected_devices(name: str) -> int:
    """Returns how many devices Ray counts on this machine, by its name of them; takes none."""
    count: int = get_accelerator_manager_for_resource(name).get_current_node_num_accelerators()
    return count


def count_devices(name: str, *, given: int | None = None) -> int:
    """How many devices a private cluster here has; `given` replaces Ray's own count."""
    count = detected_devices(name) if given is None else given
    manager = get_accelerator_manager_for_resource(name)
    visible = manager.get_current_process_visible_accelerator_ids()
    return count if visible is None else min(count, len(visible))


def shortage(plan: Plan, nodes: Sequence[Node], *, learner: bool = True) -> str | None:
    """Returns why nodes, of which the first is this process's, can never hold the plan, or None."""
    name, amounts = _amounts(plan, learner=learner)
    rooms = {str(node): node.resources.get(name, 0.0) for node in nodes}
    if assign(amounts, rooms, learner=learner) is not None:
        return None
    there = ", ".join(f"{node} has {room:g}" for node, room in rooms.items())
    remedy = "add a node, or reduce plan.samplers or plan.sampler_devices"
    if learner and (homes := _homes(plan, nodes)):
        label = json.dumps({NODE_LABEL: homes[0].ident})
        remedy = (
            f"start it on {homes[0]}: with launch/submit.sh, or with ray job submit "
            f"--entrypoint-label-selector '{label}'"
        )
    first = ", the learner's on that of this command" if learner else ""
    return (
        f"plan.platform = {plan.platform!r} needs {' + '.join(f'{one:g}' for one in amounts)} "
        f"{name}, those of a process on one node{first}; {there}; {remedy}"
    )


def home_node(plan: Plan, nodes: Sequence[Node]) -> Node:
    """The first node that can have the process of a run: the learner is there, too.

    Raises:
        ValueError: if there is none.
    """
    if homes := _homes(plan, nodes):
        return homes[0]
    raise ValueError(shortage(plan, nodes))


def _homes(plan: Plan, nodes: Sequence[Node]) -> list[Node]:
    """The nodes on which a run can be started."""
    name, amounts = _amounts(plan, learner=True)
    found = []
    for home in nodes:
        order = [home, *(node for node in nodes if node is not home)]
        rooms = {node.ident: node.resources.get(name, 0.0) for node in order}
        if assign(amounts, rooms, learner=True) is not None:
            found.append(home)
    return found
