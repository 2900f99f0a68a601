"""One reward process as its host sees it: started with limits, ended with all that it started.

The process and all that it starts carry a mark in their environment, so that none of them is left
when it is ended, also those that have left its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rewards.base import Outcome, RewardError, RewardInput
from rewards.processes.log import MOST_OUTPUT, RewardLog
from rewards.processes.worker import Settings

START_TIMEOUT_S = 300.0
"""Time limit for a process to import its function."""
_VARIABLE = "GEMMA_GRPO_REWARD_PROCESS"
_MOST_PROCESSES = 512
"""Threads and processes of a reward process, where a pids cgroup can be had."""
_LONGEST_ANSWER = 2**20
_PIPE_BYTES = 2**16
_SETTLE_S = 0.3
"""Seconds for the end of a process whose connection is closed, and for the stacks of one that will
be ended."""
_EXIT_S = 10.0
_RUN = "from rewards.processes import worker; worker.run"
_BROKEN = "its process wrote something else into the connection to its host"
_OF_KEYS = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
"""Names of environment variables that hold keys."""
_SHORTEST_KEY = 8


class ProcessEnded(ChildProcessError):  # noqa: N818  # the host handles it
    """The process has ended, or does not answer as it should; the message says how."""


@dataclass(eq=False)
class Job:
    """One input of one function, with the future of its outcome.

    It is repeated after a death or a time-out.
    """

    given: RewardInput
    outcome: asyncio.Future[Outcome]
    is_repeated: bool = False


class RewardProcess:
    """A running reward process; `log` receives what it prints under the `name` of its part.

    Attributes:
        facts: what it reported about its function, after `start`.
        jobs: those that it scores, by their `id`.
        fresh: whether it has scored nothing, or only jobs that were repeated alone.
        dumps: whether its output is the stacks that `dump` asked for.
    """

    def __init__(self, settings: Settings, *, name: str, log: RewardLog) -> None:
        self._settings, self._name, self._log = settings, name, log
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroup: Path | None = None
        self._closing = contextlib.ExitStack()
        self._printed = b""
        self.facts: dict[str, Any] = {}
        self.jobs: dict[int, Job] = {}
        self.fresh = True
        self.dumps = False

    async def start(self) -> None:
        """Starts the process and imports its function.

        Raises:
            ValueError: if the function is refused.
            OSError: if the process cannot be started, or ends before it is ready.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._pipe, output = os.pipe()
            self._closing.callback(os.close, self._pipe)
            os.set_blocking(self._pipe, False)
            try:
                self._process = self._spawn(theirs, output)
            finally:
                os.close(output)
            self._cgroup = _limit_processes(self._process.pid)
            self._answers, self._messages = await asyncio.open_unix_connection(
                sock=ours.dup(), limit=_LONGEST_ANSWER
            )
        self._closing.callback(self._messages.transport.abort)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe, self._read)
        self._closing.callback(loop.remove_reader, self._pipe)
        self._messages.write(pickle.dumps(self._settings))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await self._answer()
        except TimeoutError:
            raise ProcessEnded(f"importing it took longer than {START_TIMEOUT_S:g} s") from None
        if "refused" in answer:
            raise ValueError(answer["refused"])
        self.facts = answer["ready"] | {"columns": tuple(answer["ready"]["columns"])}

    def _spawn(self, channel: socket.socket, output: int) -> subprocess.Popen[bytes]:
        variables = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            _VARIABLE: self._mark,
        }
        return subprocess.Popen(
            # Not with -m: the classes of messages would be those of `__main__`.
            [sys.executable, "-P", "-c", f"{_RUN}({channel.fileno()})"],
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **variables},
        )

    def send(self, jobs: Sequence[Job]) -> None:
        """Sends jobs to score; if the process has ended, `result` says how."""
        if jobs:
            self.jobs |= {id(job): job for job in jobs}
            self._messages.write(pickle.dumps([(id(job), job.given) for job in jobs]))

    async def result(self) -> tuple[Job, Outcome, str]:
        """The next job that is scored, its outcome, and its traceback; or raises ProcessEnded."""
        answer = await self._answer()
        self.pass_output()
        try:
            number, value, error, named, trace = answer
            found = None if error is None else RewardError(*error)
            return self.jobs.pop(number), Outcome(value, found, named), trace
        except (TypeError, ValueError, KeyError):  # written by the function itself
            raise ProcessEnded(_BROKEN) from None

    async def _answer(self) -> Any:
        try:
            line = await self._answers.readuntil()
            return json.loads(_without_keys(line.decode()))
        except (asyncio.IncompleteReadError, OSError):
            raise ProcessEnded(await self._how_it_ended()) from None
        except (asyncio.LimitOverrunError, ValueError):
            raise ProcessEnded(_BROKEN) from None

    async def dump(self) -> None:
        """Lets the process write the stacks of its threads to its output, before it is ended."""
        self.pass_output()
        self.dumps = True
        assert self._process is not None
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(_SETTLE_S)

    def pass_output(self) -> None:
        """Passes on what the process has printed."""
        self._read()
        if self._printed:
            text = _without_keys(self._printed.decode(errors="replace"))
            what = "it is interrupted here" if self.dumps else "output"
            given = [job.given for job in self.jobs.values()]
            self._log.output(self._name, given, text, what=what)
        self._printed = b""

    async def kill(self) -> None:
        """Ends the process and all that it has started."""
        if self._process is not None:
            await asyncio.to_thread(self._end_all)
            self.pass_output()
        self._closing.close()

    def _read(self) -> None:
        """Reads what the pipe holds; what is more than the log takes is dropped."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._pipe, _PIPE_BYTES)
            if not data:  # closed
                asyncio.get_running_loop().remove_reader(self._pipe)
            if len(self._printed) <= MOST_OUTPUT:
                self._printed += data

    async def _how_it_ended(self) -> str:
        await asyncio.sleep(_SETTLE_S)
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return "its process closed the connection to its host"
        if status >= 0:
            return f"its process ended with status {status}"
        return f"its process was ended by {signal.Signals(-status).name}"

    def _end_all(self) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        marked = list[psutil.Process]()
        for other in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if other.environ().get(_VARIABLE) == self._mark:
                    other.kill()
                    marked.append(other)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        if self._cgroup is not None:
            psutil.wait_procs(marked, timeout=_EXIT_S)
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()


def _without_keys(text: str) -> str:
    """The text with names of environment variables in place of the keys that they hold."""
    for name, value in os.environ.items():
        if _OF_KEYS.search(name) and len(value) >= _SHORTEST_KEY:
            text = text.replace(value, f"[{name}]")
    return text


def _limit_processes(pid: int) -> Path | None:
    """Puts a process into a pids cgroup of its own, if one can be had (version 1 or 2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers not in {"", "pids"}:
            continue
        parent = Path("/sys/fs/cgroup", controllers, place.lstrip("/"))
        group = parent / f"gemma-grpo-reward-{pid}"
        try:
            group.mkdir()
            (group / "pids.max").write_text(str(_MOST_PROCESSES))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:  # not allowed, or this hierarchy does not control pids
            with contextlib.suppress(OSError):
                group.rmdir()
        else:
            return group
    return None
