"""Whether a run makes progress: `progress` and `slow` of `status.json`, which its parent reads.

learner, samplers, rewards -> heartbeats -> the run's process -> status.json -> its parent
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from pipeline.clock import Heartbeat, PhaseClock
from pipeline.run.console import Console

T = TypeVar("T")

_EVERY_S = 2.0
_SLOW = frozenset({"ray_start", "loading", "compile", "checkpoint", "export", "end"})
"""Phases that may last long without progress."""
_WAITS = "device_wait"


async def watched(
    work: Coroutine[Any, Any, T],
    processes: Mapping[str, Callable[[], Awaitable[Heartbeat]]],
    *,
    phases: PhaseClock,
    console: Console,
) -> T:
    """The result of `work`, during which the progress of all processes is noted.

    `processes` has a method of each that returns its heartbeat.

    Raises:
        WorkerDied: if a process dies, also one that nobody has called.
    """
    watching = asyncio.create_task(_watch(processes, phases, console))
    tasks = asyncio.create_task(work), watching
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else watching.result()
    finally:
        console.update(slow=True)  # what follows ends the run
        for task in tasks:  # not waited for: what a death leaves may take a minute
            task.cancel()


async def _watch(
    processes: Mapping[str, Callable[[], Awaitable[Heartbeat]]],
    phases: PhaseClock,
    console: Console,
) -> NoReturn:
    asked = dict[str, asyncio.Future[Heartbeat]]()
    known = dict[str, str | None]()
    heard_s = dict[str, float]()
    try:
        while True:
            beats = {"": phases.heartbeat()}
            for name, heartbeat in processes.items():
                if name in asked and asked[name].done():
                    beats[name] = asked.pop(name).result()
                if name not in asked:
                    asked[name] = asyncio.ensure_future(heartbeat())
            now_s = time.monotonic()
            moved = beats[""].phase == _WAITS or any(
                beat.phase is not None and beat.unchanged_s < now_s - heard_s.get(name, now_s)
                for name, beat in beats.items()
            )
            heard_s |= dict.fromkeys(beats, now_s)
            known |= {name: beat.phase for name, beat in beats.items()}
            console.update(
                progress=console.status.progress + moved,
                slow=not _SLOW.isdisjoint(known.values()),
            )
            await asyncio.sleep(_EVERY_S)
    finally:
        for task in asked.values():
            task.cancel()
