"""The Ray cluster of a run: the one it was submitted to, or a private one.

Never joins or stops another user's cluster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray._private import auto_init_hook

from actors.groups import DeviceActors
from actors.placement import RESOURCE, Reservation, alive_nodes, shortage, total_resources
from configs.schema import Config, Plan
from launch.exits import EXIT_CLUSTER_LOST, Failure, say
from launch.flags import RESTARTED_WHY
from launch.private_cluster import private_cluster
from launch.stop import Stop, Stopped, unless
from pipeline.protocols import WorkerDied

A = TypeVar("A", bound=DeviceActors)
T = TypeVar("T")

REPORT_WAIT_EVERY_S = 60.0
"""Interval of the messages while a job waits for devices."""
_OTHER_PROCESSES = 2
"""Those without devices: the rewards' host and the exporter."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Of a private cluster for a plan on CPUs; elsewhere Ray chooses."""


@contextmanager
def cluster(config: Config, *, learner: bool = True) -> Iterator[None]:
    """Joins the cluster of this process's job, or starts a private one; leaves it at the end.

    Without a learner only samplers need devices.

    Raises:
        ValueError: if the cluster can never provide the plan's devices, or RAY_ADDRESS names none.
        Failure: if a private cluster does not start, a process of the body dies, or the cluster of
            a run that is started again is gone.
    """
    # Otherwise a call after the end of the cluster would start another one.
    auto_init_hook.enable_auto_connect = False
    plan, chips = config.plan, config.run.tpu_chips
    if "RAY_ADDRESS" in os.environ:
        joined = _joined()
    else:
        joined = private_cluster(
            num_cpus=_cpus(plan, learner=learner),
            resources=None if chips is None else {RESOURCE["tpu"]: chips},
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES if plan.platform == "cpu" else None,
        )
    with joined:
        problem = shortage(plan, alive_nodes(), learner=learner)
        if problem:
            raise ValueError(problem)
        try:
            yield
        except WorkerDied as death:
            raise Failure(f"{death}; give the same command again") from None


def with_actors(
    spawn: Callable[[], A],
    work: Callable[[A], Coroutine[Any, Any, T]],
    *,
    config: Config,
    learner: bool = True,
) -> T:
    """Runs a command that writes its result at the end: starts its actors, works, ends them.

    `spawn` requests the actors from Ray; `work` gets them once their devices are reserved.

    Raises:
        SystemExit: after a signal, with 128 plus its number.
    """
    stop = Stop(notice="stopping: nothing is written")

    async def work_once_placed(actors: A) -> T:
        await wait_for_devices(actors.devices)
        say("Devices acquired; loading weights and compiling.")
        return await work(actors)

    async def run() -> T:
        stop.listen()
        with cluster(config, learner=learner):
            stop.listen()
            actors = spawn()
            try:
                return await unless(stop, work_once_placed(actors))
            finally:
                actors.kill()

    try:
        return asyncio.run(run())
    except Stopped:
        raise SystemExit(stop.exit_status) from None


@contextmanager
def _joined() -> Iterator[None]:
    address = os.environ["RAY_ADDRESS"]
    try:
        ray.init(log_to_driver=False)
    except (ConnectionError, ValueError) as error:  # ValueError: the address has another form
        if RESTARTED_WHY in os.environ:
            raise Failure(
                f"the cluster of this run at RAY_ADDRESS = {address} is gone; the same command "
                "continues once it runs again",
                EXIT_CLUSTER_LOST,
            ) from None
        raise ValueError(
            f"RAY_ADDRESS = {address}: no Ray cluster answers there; start one, or unset "
            "RAY_ADDRESS for a private cluster (launch/submit.sh submits to a dashboard)"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _cpus(plan: Plan, *, learner: bool) -> int:
    """CPUs of a private cluster: Ray starts as many idle processes, and actors at a time.

    Each process with CPU devices needs one; others are started together as far as there are cores.
    """
    needed = int(total_resources(plan, learner=learner).get(RESOURCE["cpu"], 1))
    processes = plan.num_samplers + int(learner and plan.placement == "split") + _OTHER_PROCESSES
    return max(needed, min(os.cpu_count() or 1, processes))


async def wait_for_devices(devices: Reservation) -> None:
    """Returns when all devices are reserved; prints every minute what it waits for.

    Raises:
        WorkerDied: see `Reservation.placed`.
    """
    placed, name = asyncio.ensure_future(devices.placed()), devices.resource
    try:
        while not (await asyncio.wait({placed}, timeout=REPORT_WAIT_EVERY_S))[0]:
            total, free = ray.cluster_resources(), ray.available_resources()
            say(
                f"waiting for devices: {devices.amount:g} {name} together ({free.get(name, 0.0):g} "
                f"of {total.get(name, 0.0):g} free); `ray list placement-groups` names who holds "
                "them"
            )
        placed.result()
    finally:
        placed.cancel()
