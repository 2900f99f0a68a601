"""Ends the work of this process when a process of Ray ends that its cluster cannot run without."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

from actors.placement import cluster_is_gone
from launch.exits import EXIT_RAY_LOST, Failure

_POLL_S = 0.5
_STOPPED_S = 20.0
"""Seconds for which a process may be stopped; Ray would wait for it for minutes."""


class ClusterLost(Failure):
    """An essential process of Ray ended; the same command resumes the run."""

    def __init__(self, why: str) -> None:
        super().__init__(why, EXIT_RAY_LOST)


class RayWatch:
    """Watches processes of Ray; cancels the current task if one of them ends.

    Args:
        then: called after that.
    """

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._then = then
        self._stopping = False
        self._processes: list[int] = []
        self._lost: str | None = None
        cluster_is_gone.clear()
        self._loop = self._task = None
        with suppress(RuntimeError):  # no event loop
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()

    def begin(self, processes: Mapping[str, int]) -> None:
        """Watches processes, given by name and pid, in threads."""
        self._processes += processes.values()
        for name, pid in processes.items():
            threading.Thread(target=self._watch, args=(name, pid), daemon=True).start()

    def stop(self) -> None:
        """Takes later ends as intended."""
        self._stopping = True

    @property
    def is_lost(self) -> bool:
        """Whether a process has ended, or is stopped."""
        return self._lost is not None or not all(map(_runs, self._processes))

    def raise_if_lost(self) -> None:
        """Raises the end of a process.

        Raises:
            ClusterLost: if a process ended before `stop`.
        """
        if self._lost is not None:
            raise ClusterLost(self._lost) from None

    def _watch(self, name: str, pid: int) -> None:
        """Waits for the end of a process; one that stays stopped is killed."""
        stopped_s = 0.0
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            while (status := process.status()) != psutil.STATUS_ZOMBIE:
                stopped_s = stopped_s + _POLL_S if status == psutil.STATUS_STOPPED else 0.0
                if stopped_s >= _STOPPED_S:
                    process.kill()
                time.sleep(_POLL_S)
        if self._stopping or self._lost is not None:
            return
        self._lost = (
            f"Ray's process {name} (pid {pid}) ended unexpectedly, which ended this command; the "
            "same command resumes the run from its last checkpoint"
        )
        cluster_is_gone.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        # Otherwise Ray's calls would wait for an answer for minutes.
        self._then()


def _runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED}
    return False
