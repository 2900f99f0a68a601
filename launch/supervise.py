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
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from configs.schema import Config
from launch.exits import EXIT_FAILED, EXIT_RAY_LOST, EXIT_REPORTED, say
from launch.flags import SUPERVISE, SUPERVISED
from launch.heartbeat import PIPE, has_beaten
from launch.stop import stop_signals
from launch.submission import VARIABLE as SUBMITTED
from pipeline.budget import Budget, used_s
from pipeline.contracts.record_files import DamagedFileError
from pipeline.contracts.restarts import RestartBudget
from pipeline.run.run_folder import RunFolder

_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: a child process must not do that between fork and exec


def supervise(argv: Sequence[str], config: Config) -> int:
    """Runs `launch.train` until it ends; returns its exit status.

    Args:
        argv: arguments of `launch.train`.
        config: of the run.
    """
    given = [one for one in argv if one != SUPERVISE]
    return _Supervisor(given, config).run()


class _Supervisor:
    """See `supervise`."""

    def __init__(self, argv: Sequence[str], config: Config) -> None:
        self._argv = argv
        self._config = config
        self._folder = RunFolder.of(config)
        self._faults = config.faults
        self._budget = RestartBudget(config.faults.restarts)
        self._child: subprocess.Popen[bytes] | None = None
        self._signalled = threading.Event()
        self._unsent = deque[int]()
        self._received = self._done = 0
        self._lived_s = 0.0
        self._is_silent = False

    def run(self) -> int:
        """Runs the command, as often as necessary; returns the exit status."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        argv, environment = list(self._argv), {**os.environ, SUPERVISED: ""}
        extensions, self._done = self._count("extended"), self._steps()
        while True:
            self._lived_s = time.monotonic()
            status = self._run_child(argv, environment)
            if self._signalled.is_set():
                return status if status >= 0 else 128 + self._received
            why = self._death(status)
            if why is None:
                return EXIT_FAILED if status == EXIT_REPORTED else status
            pause_s = self._pause_s(why)
            if pause_s is None:
                return EXIT_FAILED
            if self._count("extended") > extensions:
                argv = without(argv, "--extend")
            if self._signalled.wait(pause_s):
                return 128 + self._received
            self._count_time()
            environment[SUPERVISED] = why
            if SUBMITTED in environment:  # the time until now is counted already
                environment[SUBMITTED] = str(time.time())

    def _count_time(self) -> None:
        """Counts the time since the process was last seen alive as used by the run."""
        with suppress(OSError, DamagedFileError):  # there is no folder, or none to resume
            gap_s = time.monotonic() - self._lived_s
            self._folder.record_used_s(used_s(self._folder) + gap_s)

    def _pause_s(self, why: str) -> float | None:
        """Says what follows a death; seconds to wait before the restart, None: there is none."""
        steps = self._steps()
        if steps > self._done:
            self._done = steps
            self._budget.renew()
        pause_s, text, out = self._budget.next_pause_s(), "", sys.stderr
        if self._is_time_up():
            pause_s, text = None, f"{why}; no time is left to start it again"
        elif pause_s is None:
            text = f"{why} {self._budget.used + 1} times without a new training step; the same "
            text += "command continues from the last checkpoint"
        else:
            text, out = f"{why}; it is started again, and the run resumes", sys.stdout
        say(text, file=out)
        return pause_s

    def _run_child(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Runs the command once; returns its exit status, negative if a signal ended it."""
        heartbeats, sends = os.pipe()
        os.set_blocking(heartbeats, False)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "launch.train", *argv],
            env={**environment, PIPE: str(sends)},
            pass_fds=(sends,),
            # Ctrl-C reaches it through this process only, and thus once.
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  # a system call
        )
        os.close(sends)
        self._forward()  # what arrived while it was started
        try:
            return self._wait(self._child, heartbeats)
        finally:
            self._child = None
            os.close(heartbeats)

    def _wait(self, child: subprocess.Popen[bytes], heartbeats: int) -> int:
        """Waits for the end of the command, which is killed if its heartbeats cease."""
        self._is_silent, has_begun = False, False
        while True:
            if has_beaten(heartbeats):
                has_begun = True
                self._lived_s = time.monotonic()
            elif not has_begun:
                self._lived_s = time.monotonic()
            elif time.monotonic() - self._lived_s > self._faults.silent_s:
                self._is_silent = True
                child.kill()
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL_S)

    def _death(self, status: int) -> str | None:
        """How the command died; None if it has ended by itself."""
        if self._is_silent and status < 0:
            return f"the run's process gave no heartbeat for {self._faults.silent_s:g} s"
        if status < 0:
            return f"the run's process was ended by {signal.Signals(-status).name}"
        if status == EXIT_RAY_LOST:
            return "the run lost its Ray cluster"
        if status == EXIT_FAILED:
            return "the run's process ended with status 1 and no reason, as without a raylet"
        return None

    def _is_time_up(self) -> bool:
        with suppress(DamagedFileError):
            budget = Budget.of(self._config, self._folder)
            return budget.is_used_up(elapsed_s=used_s(self._folder), now_s=time.time())
        return False

    def _count(self, event: str) -> int:
        with suppress(DamagedFileError):
            return sum(1 for _ in self._folder.events(event))
        return 0

    def _steps(self) -> int:
        with suppress(DamagedFileError):
            return max((row["step"] for row in self._folder.metrics), default=0)
        return 0

    def _on_signal(self, number: int, _: object) -> None:
        self._received = self._received or number
        self._unsent.append(number)
        self._signalled.set()
        self._forward()

    def _forward(self) -> None:
        """Sends each signal once, to a command that runs; a signal may interrupt this."""
        with suppress(IndexError):  # all are sent
            while self._child is not None:
                self._child.send_signal(self._unsent.popleft())


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
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
