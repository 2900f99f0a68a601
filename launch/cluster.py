"""The Ray cluster a run works on: the one it was submitted to, or a private one of its own.

Never joins or stops somebody else's cluster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from actors.placement import RESOURCE, Reservation, needed, shortage
from configs.schema import Plan
from launch.private_cluster import private_cluster

SAY_AFTER_S = 60.0
"""How long a job waits for devices before it says so, and how often it says it again."""
_OBJECT_STORE_BYTES = 512 * 2**20


@contextmanager
def cluster(plan: Plan, *, learner: bool = True) -> Iterator[None]:
    """Joins the cluster that this process is a job of, or starts a private one; leaves it again.

    Args:
        plan: what it must hold.
        learner: whether there will be one; without it the plan's samplers are all.

    Raises:
        ValueError: if the cluster can never hold the plan's devices, or is named by an address
            where none answers or that only takes jobs.
        Failure: if a private cluster does not start, or ends before the body does.
    """
    with _joined() if "RAY_ADDRESS" in os.environ else _started(plan, learner=learner):
        lacking = shortage(plan, ray.cluster_resources(), learner=learner)
        if lacking:
            raise ValueError(lacking)
        yield


@contextmanager
def _joined() -> Iterator[None]:
    address = os.environ["RAY_ADDRESS"]
    if address.startswith(("http://", "https://")):
        raise ValueError(
            f"RAY_ADDRESS = {address} is a dashboard, which takes jobs: use launch/submit.sh, or "
            "unset it for a private cluster"
        )
    try:
        ray.init(log_to_driver=False)
        yield
    except ConnectionError as error:
        if ray.is_initialized():
            raise
        raise ValueError(
            f"RAY_ADDRESS = {address}: no Ray cluster answers there; start one, or unset it for a "
            "private cluster"
        ) from error
    finally:
        ray.shutdown()


@contextmanager
def _started(plan: Plan, *, learner: bool) -> Iterator[None]:
    cpus = max(os.cpu_count() or 1, int(needed(plan, learner=learner).get("CPU", 1)))
    with private_cluster(
        num_cpus=cpus,
        log_to_driver=False,
        object_store_memory=_OBJECT_STORE_BYTES if plan.platform == "cpu" else None,
    ):
        yield


async def wait_for_devices(devices: Reservation, plan: Plan, *, learner: bool = True) -> None:
    """Returns when all devices are reserved; says every minute what it waits for."""
    placed = asyncio.ensure_future(devices.placed())
    while not (await asyncio.wait({placed}, timeout=SAY_AFTER_S))[0]:
        print(_waiting_line(devices, plan, learner=learner), flush=True)
    placed.result()


def _waiting_line(devices: Reservation, plan: Plan, *, learner: bool) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    amounts = ", ".join(
        f"{amount:g} {name} together ({free.get(name, 0.0):g} of {total.get(name, 0.0):g} free)"
        for name, amount in needed(plan, learner=learner).items()
    )
    holders = _holders(RESOURCE[plan.platform], own=devices.group.id.hex())
    return f"waiting for devices: {amounts}; held by: {holders}"


def _holders(resource: str, *, own: str) -> str:
    """Who else has some of a resource, as far as the cluster tells."""
    held = []
    for group in placement_group_table().values():
        amount = sum(bundle.get(resource, 0.0) for bundle in group["bundles"].values())
        if amount and group["state"] == "CREATED" and group["placement_group_id"] != own:
            name = group["name"] or f"placement group {group['placement_group_id']}"
            held.append(f"{name} ({amount:g} {resource})")
    try:
        held += _actors_without_a_group(resource)
    except Exception as error:  # noqa: BLE001  # needs the dashboard, which may not run
        if not held:
            return f"unknown ({type(error).__name__})"
    return "; ".join(held) or "nobody that the cluster lists; devices may still be starting"


def _actors_without_a_group(resource: str) -> list[str]:
    """Actors of other programs that have leased a resource by themselves."""
    from ray.util.state import list_actors

    states: list[Any] = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
    return [
        f"{state.name or state.class_name} of job {state.job_id}, pid {state.pid} "
        f"({state.required_resources[resource]:g} {resource})"
        for state in states
        if resource in (state.required_resources or {}) and not state.placement_group_id
    ]
