"""Starts `launch.train` again where its process dies, or Ray's.

    launch.train --supervise  ->  launch.train (a child process)  ->  Ray, actors

The new process resumes the run, whose clock goes on. Mistakes, failures that the run reports, and
signals to this process end both.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from configs.faults import Faults
from launch.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_MISTAKE
from launch.flags import SUPERVISE
from launch.submission import VARIABLE as SUBMITTED
from pipeline.contracts.record_files import DamagedFileError
from pipeline.contracts.restarts import RestartBudget
from pipeline.run.run_folder import ENDED, RunFolder

_ENDS = frozenset({0, EXIT_MISTAKE, EXIT_INTERRUPTED, 128 + signal.SIGTERM})
"""Exit statuses of a run that has ended by itself or at a signal."""
_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def supervise(argv: Sequence[str], folder: RunFolder, faults: Faults) -> int:
    """Runs `launch.train` until it ends; returns its exit status.

    Args:
        argv: arguments of `launch.train`.
        folder: of its run.
        faults: how often it is started again without a new training step in between, and after how
            many seconds a process that is stopped is ended.
    """
    given = [one for one in argv if one != SUPERVISE]
    return _Supervisor(without(given, "--adopt"), folder, faults).run()  # it is adopted


class _Supervisor:
    """See `supervise`."""

    def __init__(self, argv: Sequence[str], folder: RunFolder, faults: Faults) -> None:
        self._argv = argv
        self._folder = folder
        self._faults = faults
        self._budget = RestartBudget(faults.restarts)
        self._child: subprocess.Popen[bytes] | None = None
        self._signalled = threading.Event()
        self._received = 0

    def run(self) -> int:
        """Runs the command, as often as necessary; returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        argv, environment = list(self._argv), dict(os.environ)
        extensions, steps = self._count("extended"), self._steps()
        while True:
            status = self._run_child(argv, environment)
            if self._signalled.is_set():
                return status if status >= 0 else 128 + self._received
            why = self._death(status)
            if why is None:
                return status
            if self._steps() > steps:
                steps = self._steps()
                self._budget.renew()
            pause_s = self._budget.next_pause_s()
            if pause_s is None:
                print(
                    f"{why} {self._budget.used + 1} times without a new training step; the same "
                    "command continues from the last checkpoint",
                    file=sys.stderr,
                )
                return EXIT_FAILED
            print(f"{why}; it is started again, and the run resumes", flush=True)
            if SUBMITTED in environment:  # the time until now is counted already
                environment[SUBMITTED] = str(time.time())
            if self._count("extended") > extensions:
                argv = without(argv, "--extend")
            if self._signalled.wait(pause_s):
                return 128 + self._received

    def _run_child(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Runs the command once; returns its exit status, negative if a signal ended it."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "launch.train", *argv],
            env=environment,
            # Ctrl-C reaches it through this process only, and thus once.
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  # this process has one thread
        )
        if self._signalled.is_set():  # while it was started
            self._child.send_signal(self._received)
        stopped_s, process = 0.0, psutil.Process(self._child.pid)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._child.wait(_POLL_S)
            with suppress(psutil.Error):
                is_stopped = process.status() == psutil.STATUS_STOPPED
                stopped_s = stopped_s + _POLL_S if is_stopped else 0.0
            if stopped_s > self._faults.silent_s:
                self._child.kill()

    def _death(self, status: int) -> str | None:
        """How the command died; None if it has ended by itself."""
        if status in _ENDS:
            return None
        if status < 0:
            return f"the run's process was ended by {signal.Signals(-status).name}"
        if not self._folder.holds_run or self._has_failed():
            return None
        return f"the run's process ended with status {status}"

    def _has_failed(self) -> bool:
        """Whether the command has journaled why it ended, and may not be started again."""
        last: dict[str, Any] = {}
        with suppress(DamagedFileError):
            for entry in self._folder.entries():
                if entry["event"] in {"started", "failed", ENDED}:
                    last = entry
        return last.get("event") == "failed" and not last.get("resumes")

    def _count(self, event: str) -> int:
        with suppress(DamagedFileError):
            return sum(1 for _ in self._folder.events(event))
        return 0

    def _steps(self) -> int:
        with suppress(DamagedFileError):
            return max((row["step"] for row in self._folder.metrics), default=0)
        return 0

    def _forward(self, number: int, _: object) -> None:
        self._received = self._received or number
        self._signalled.set()
        if self._child is not None:
            self._child.send_signal(number)


def without(argv: Sequence[str], flag: str) -> list[str]:
    """The arguments without a flag and its value: what it does is done, and not to be repeated."""
    found, is_value = list[str](), False
    for one in argv:
        if not is_value and one != flag and not one.startswith(f"{flag}="):
            found.append(one)
        is_value = not is_value and one == flag
    return found


def _end_with_parent() -> None:
    """Makes Linux send SIGTERM to this process when the one that starts it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
