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
_CLOSED_S = 2.0
"""Seconds for which a process that has closed its port may shut down."""


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
        self._stopping = self._finished = False
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
            facts = (name, pid, _listens(pid))
            threading.Thread(target=self._watch, args=facts, daemon=True).start()

    def stop(self) -> None:
        """Takes later ends as intended."""
        self._stopping = True

    def finish(self) -> None:
        """The command has its result: the end of a process, seen or not, is no longer its own."""
        self._finished = True

    @property
    def is_lost(self) -> bool:
        """Whether a process has ended, or is stopped."""
        return self._lost is not None or not all(map(_runs, self._processes))

    def raise_if_lost(self) -> None:
        """Raises the end of a process.

        Raises:
            ClusterLost: if a process ended before `stop` and `finish`.
        """
        if self._lost is not None and not self._finished:
            raise ClusterLost(self._lost) from None

    def _watch(self, name: str, pid: int, listened: bool) -> None:  # noqa: FBT001
        """Waits for the end of a process; one that stays stopped, or shuts down, is killed."""
        hangs_s = 0.0
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            while (status := process.status()) != psutil.STATUS_ZOMBIE:
                # After SIGTERM a GCS closes its port, and stays for a minute or more.
                is_closed = listened and not _listens(pid)
                hangs = is_closed or status == psutil.STATUS_STOPPED
                hangs_s = hangs_s + _POLL_S if hangs else 0.0
                if hangs_s >= (_CLOSED_S if is_closed else _STOPPED_S):
                    process.kill()
                time.sleep(_POLL_S)
        if self._stopping or self._lost is not None:
            return
        self._lost = (
            f"Ray's process {name} (pid {pid}) ended unexpectedly, which ended this command; the "
            "same command resumes the run from its last checkpoint"
        )
        cluster_is_gone.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._cancel)
        # Otherwise Ray's calls would wait for an answer for minutes.
        self._then()

    def _cancel(self) -> None:
        if self._task is not None and not self._finished:
            self._task.cancel()


def _listens(pid: int) -> bool:
    """Whether a process waits for connections; false for one of another user."""
    with suppress(psutil.Error):
        found = psutil.Process(pid).net_connections("inet")
        return any(one.status == psutil.CONN_LISTEN for one in found)
    return False


def _runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED}
    return False
