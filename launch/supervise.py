"""The parent of a run: starts its process, and starts it again where it dies or hangs.

    launch.train  ->  launch.train --no-supervise (a child process)  ->  Ray, actors

The new process resumes the run, whose clock goes on. What the run itself reports ends both, and so
do signals to this process, which it passes on.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from configs.schema import Config
from launch.exits import EXIT_DIED, EXIT_FAILED, EXIT_REPORTED, say
from launch.flags import RESTARTED_WHY, SUPERVISOR
from launch.stop import AT_ONCE, stop_signals
from pipeline.budget import used_s
from pipeline.run.run_folder import RunFolder
from rewards.processes.parent import end_with_parent

_POLL_S, _LONGEST_POLL_S = 1.0, 10.0
"""A longer time between two polls is one in which this process was stopped, or the machine."""
_LONGEST_PAUSE_S = 16.0
_STUCK_S, _STUCK_STEPS, _STUCK_CALLS = 300.0, 10, 2
"""Defaults of `faults.stuck_s`: seconds, lengths of the longest step, time limits of a reward."""
_SLOW_S = 1800.0
"""The same while the run loads, compiles or writes files."""
_KILL_S = 30.0
"""Killed processes get some time: an uninterruptible system call may delay their end."""


def supervise(argv: Sequence[str], config: Config) -> int:
    """Runs `launch.train` with these arguments until it ends; returns its exit status."""
    return _Supervisor(argv, config).run()


class _Supervisor:
    """See `supervise`."""

    def __init__(self, argv: Sequence[str], config: Config) -> None:
        self._argv = list(argv)
        self._config = config
        self._mark = secrets.token_hex(8)
        self._folder = RunFolder.of(config)
        self._child: subprocess.Popen[bytes] | None = None
        self._signalled = threading.Event()
        self._received = self._unsent = 0
        self._hung: str | None = None

    def run(self) -> int:
        """Runs the command, as often as necessary; returns the exit status."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        argv, limit = self._argv, self._config.faults.restarts
        # With SPT_NOENV the environment of Ray's agents, which rename themselves, can be read.
        environment = {**os.environ, SUPERVISOR: self._mark, "SPT_NOENV": "1"}
        extensions, done, deaths = self._extensions(), self._steps(), 0
        while True:
            started_s = time.time()
            status = self._run_child(argv, environment)
            why = self._death(status)
            if why is None:
                return EXIT_FAILED if status == EXIT_REPORTED else status
            if self._signalled.is_set():
                return 128 + self._received
            steps = self._steps()
            deaths = 1 if steps > done else deaths + 1
            done = max(done, steps)
            if deaths > limit:
                say(
                    f"{why}; this is death {deaths} without a new training step (faults.restarts "
                    f"= {limit}); the same command continues from the last checkpoint",
                    file=sys.stderr,
                )
                return EXIT_FAILED
            say(f"{why}; it is started again, and the run resumes")
            if self._signalled.wait(min(4.0 ** (deaths - 1), _LONGEST_PAUSE_S)):
                return 128 + self._received
            if self._extensions() > extensions:
                argv = without(argv, "--extend")
            self._count_time(started_s)
            environment[RESTARTED_WHY] = why

    def _count_time(self, started_s: float) -> None:
        """Counts the time since the process last wrote its status as used by the run."""
        with suppress(OSError):  # there is no folder
            alive_s = max(started_s, self._folder.status.stat().st_mtime)
            self._folder.record_used_s(used_s(self._folder) + time.time() - alive_s)

    def _run_child(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Runs the command once; returns its exit status, negative if a signal ended it."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "launch.train", *argv, "--no-supervise"],
            env=environment,
            # Ctrl-C reaches it through this process only, and once: a second one kills it.
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  # a system call
        )
        self._forward()  # what arrived while it was started
        try:
            return self._wait(self._child)
        finally:
            self._child = None
            _end_processes(self._mark)

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Waits for the end of the command, which is killed if it makes no progress."""
        self._hung, before, now_s = None, None, time.monotonic()
        moved_s = now_s
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL_S)
            polled_s, now_s = now_s, time.monotonic()
            was_stopped = now_s - polled_s > _LONGEST_POLL_S  # and the command with this process
            status = self._folder.last_status
            progress = status["progress"] if status.get("pid") == child.pid else None
            if progress is None or progress != before or was_stopped:
                before, moved_s = progress, now_s
            elif now_s - moved_s > (self._config.faults.stuck_s or _STUCK_S):
                limit_s = self._stuck_s(slow=status["slow"])
                if now_s - moved_s > limit_s:
                    self._hung = f"the run made no progress for {limit_s:.0f} s (faults.stuck_s)"
                    child.kill()

    def _stuck_s(self, *, slow: bool) -> float:
        limit_s = self._config.faults.stuck_s
        if limit_s is None:
            rewards, rows = self._config.rewards, self._folder.metrics
            longest_s = max((row.get("time/step_s", 0.0) for row in rows), default=0.0)
            limits = [one.timeout_s or rewards.timeout_s for one in rewards.functions]
            limit_s = max(_STUCK_S, _STUCK_STEPS * longest_s, _STUCK_CALLS * max(limits, default=0))
        return max(limit_s, _SLOW_S) if slow else limit_s

    def _death(self, status: int) -> str | None:
        """How the command died; None if it has ended by itself."""
        if self._hung is not None and status < 0:
            return self._hung
        if status < 0:
            return f"the run's process was ended by {signal.Signals(-status).name}"
        if status == EXIT_DIED:
            return "a process of the run died"
        if status == EXIT_FAILED:
            return "the run's process ended with status 1 and no reason, as without Ray's processes"
        return None

    def _extensions(self) -> int:
        return sum(1 for _ in self._folder.events("extended"))

    def _steps(self) -> int:
        return max((row["step"] for row in self._folder.metrics), default=0)

    def _on_signal(self, number: int, _: object) -> None:
        if not self._received:
            self._received = self._unsent = number
            self._signalled.set()
            self._forward()
        elif number == signal.SIGINT and self._child is not None:
            with suppress(OSError):  # the terminal is gone
                os.write(2, AT_ONCE)
            self._child.kill()

    def _forward(self) -> None:
        """Sends the first signal once, to a command that runs; a signal may interrupt this."""
        if self._child is not None and self._unsent:
            number, self._unsent = self._unsent, 0
            self._child.send_signal(number)


def without(argv: Sequence[str], flag: str) -> list[str]:
    """The arguments without a flag and its value: what it does is done, and not to be repeated."""
    found, is_value = list[str](), False
    for one in argv:
        if not is_value and one != flag and not one.startswith(f"{flag}="):
            found.append(one)
        is_value = not is_value and one == flag
    return found


def _end_processes(mark: str) -> None:
    """Kills what is left of a command, found by its environment; returns when it is gone."""
    deadline_s = time.monotonic() + _KILL_S
    while (found := _marked(mark)) and time.monotonic() < deadline_s:
        for one in found:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(found, timeout=0.2)


def _marked(mark: str) -> list[psutil.Process]:
    found = psutil.process_iter(["environ"])  # None for those of other users
    return [one for one in found if (one.info["environ"] or {}).get(SUPERVISOR) == mark]
