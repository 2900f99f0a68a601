"""The progress of a run, in one small file that its parent reads (`launch/supervise.py`).

learner, samplers, rewards -> heartbeats -> the run's process -> file -> its parent
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from launch.flags import SUPERVISOR
from pipeline.clock import Heartbeat, PhaseClock

T = TypeVar("T")

_FILE = "progress.json"
_EVERY_S = 2.0
_SLOW = frozenset({"ray_start", "loading", "compile", "checkpoint", "export", "end"})
"""Phases that may last long without progress."""
_WAITS = "device_wait"


@dataclass(frozen=True)
class Report:
    """What the file says.

    Attributes:
        written: how often it was written.
        progress: how often the run, or one of its processes, was seen to have made progress.
        slow: whether the run, or a process, loads, compiles or writes files.
    """

    written: int
    progress: int
    slow: bool


def read_report(folder: Path) -> Report | None:
    """The report in the parent's folder; None: there is none yet."""
    with suppress(FileNotFoundError):
        return Report(**json.loads((folder / _FILE).read_text()))
    return None


def forget_report(folder: Path) -> None:
    """Removes the report of a process that has ended."""
    (folder / _FILE).unlink(missing_ok=True)


class Reporter:
    """Writes the file; without a parent, nothing.

    Args:
        phases: of the run's process.
    """

    def __init__(self, phases: PhaseClock) -> None:
        folder = os.environ.get(SUPERVISOR)
        self._folder = None if folder is None else Path(folder)
        self._phases = phases
        self._report = Report(0, 0, slow=True)
        self.write()

    def write(self, *, moved: bool = False, slow: bool = True) -> None:
        """Writes the file, whether or not there was progress."""
        last = self._report
        self._report = Report(last.written + 1, last.progress + moved, slow)
        if self._folder is not None:
            new = self._folder / f"{_FILE}.new"
            new.write_text(json.dumps(asdict(self._report)))
            new.replace(self._folder / _FILE)

    async def watched(
        self,
        work: Coroutine[Any, Any, T],
        processes: Mapping[str, Callable[[], Awaitable[Heartbeat]]],
    ) -> T:
        """The result of `work`, during which the file is written every two seconds.

        Args:
            work: of the run.
            processes: a method of each that returns its heartbeat.

        Raises:
            WorkerDied: if a process dies, also one that nobody has called.
        """
        tasks = asyncio.create_task(work), asyncio.create_task(self._watch(processes))
        working, watching = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            return watching.result()
        finally:
            for task in tasks:  # not waited for: what a death leaves may take a minute
                task.cancel()

    async def _watch(self, processes: Mapping[str, Callable[[], Awaitable[Heartbeat]]]) -> NoReturn:
        asked = dict[str, asyncio.Future[Heartbeat]]()
        known = dict[str, str | None]()
        heard_s = dict[str, float]()
        try:
            while True:
                beats = {"": self._phases.heartbeat()}
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
                self.write(moved=moved, slow=not _SLOW.isdisjoint(known.values()))
                await asyncio.sleep(_EVERY_S)
        finally:
            for task in asked.values():
                task.cancel()
