"""The Ray cluster a run works on: the one it was submitted to, or a private one of its own.

Never joins or stops somebody else's cluster.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# `uv run` would make Ray's workers run a copy of the project in a fresh environment.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

from actors.placement import needed, shortage
from configs.schema import Plan
from pipeline.held_folder import HeldFolder

SAY_AFTER_S = 60.0
"""How long a job waits for devices before it says so, and how often it says it again."""
_OBJECT_STORE_BYTES = 512 * 2**20
_LONGEST_PARENT = 25
"""Bytes: Ray puts Unix sockets up to 78 deeper, and accepts 103 on macOS, 107 on Linux."""


@contextmanager
def cluster(plan: Plan, *, learner: bool = True) -> Iterator[None]:
    """Joins the cluster that this process is a job of, or starts a private one; leaves it again.

    Args:
        plan: what it must hold.
        learner: whether there will be one; without it the plan's samplers are all.

    Raises:
        ValueError: if the cluster can never hold the plan's devices, or is named by an address that
            only takes jobs.
    """
    temporary = None
    address = os.environ.get("RAY_ADDRESS")
    if address is not None and address.startswith(("http://", "https://")):
        raise ValueError(
            f"RAY_ADDRESS = {address} is a dashboard, which takes jobs: use launch/submit.sh, or "
            "unset it for a private cluster"
        )
    try:
        if address is not None:
            ray.init(log_to_driver=False)
        else:
            temporary = HeldFolder(_short_folder(), prefix="grpo-")
            cpus = max(os.cpu_count() or 1, int(needed(plan, learner=learner).get("CPU", 1)))
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=_OBJECT_STORE_BYTES if plan.platform == "cpu" else None,
                _temp_dir=str(temporary.path),
            )
        lacking = shortage(plan, ray.cluster_resources(), learner=learner)
        if lacking:
            raise ValueError(lacking)
        yield
    finally:
        ray.shutdown()
        if temporary:
            temporary.remove()


def _short_folder() -> Path:
    """Where temporary files go, unless its name is too long for sockets."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST_PARENT else "/tmp")


async def wait_for_devices(actors: Sequence[Any], plan: Plan, *, learner: bool = True) -> None:
    """Returns when all actors have their devices; says every minute what it still waits for."""
    # Awaited rather than `ray.wait` in a thread, which could not be cancelled.
    waiting = {asyncio.ensure_future(actor.__ray_ready__.remote()) for actor in actors}
    while True:
        done, waiting = await asyncio.wait(waiting, timeout=SAY_AFTER_S)
        for ready in done:
            ready.exception()  # of an actor that failed, who calls it next is told
        if not waiting:
            return
        print(_waiting_line(len(waiting), plan, learner=learner), flush=True)


def _waiting_line(processes: int, plan: Plan, *, learner: bool = True) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    amounts = ", ".join(
        f"{amount:g} {name} in all ({free.get(name, 0.0):g} of {total.get(name, 0.0):g} free)"
        for name, amount in needed(plan, learner=learner).items()
    )
    return f"waiting for devices: {processes} process(es), {amounts}; held by: {_holders()}"


def _holders() -> str:
    """Other jobs' actors that hold resources, as far as the cluster tells."""
    own = ray.get_runtime_context().get_job_id()
    try:
        from ray.util.state import list_actors

        states = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
    except Exception as error:  # noqa: BLE001  # needs the dashboard, which may not run
        return f"unknown ({type(error).__name__})"
    held = [
        f"{state.class_name} of job {state.job_id} (pid {state.pid}): {state.required_resources}"
        for state in states
        if state.job_id != own and state.required_resources
    ]
    return "; ".join(held) or "nobody that the cluster lists; devices may still be starting"
