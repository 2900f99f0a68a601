"""One reward process as its host sees it: started with limits, ended as a group.

The process and all that it starts carry a mark in their environment, so that none of them is left
when it is ended, also those that have left its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from rewards.base import RewardInput
from rewards.processes.worker import Settings, message

Output = Callable[[str], None]
"""Receives what was printed."""

_VARIABLE = "GEMMA_GRPO_REWARD_PROCESS"
_MOST_PROCESSES = 512
"""Threads and processes of a reward process, where a pids cgroup can be had."""
_LONGEST_ANSWER = 2**20
_CHUNK = 2**16
_SETTLE_S = 0.3
"""Seconds for the last answers of a process that has ended, and for the stacks of one that will."""
_EXIT_S = 10.0
_RUN = "from rewards.processes import worker; worker.run"
_OF_KEYS = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
"""Names of environment variables that hold keys."""
_SHORTEST_KEY = 8


class ProcessEnded(Exception):  # noqa: N818  # the host handles it
    """The process has ended, or does not answer as it should; the message says how."""


class _Answers(asyncio.Protocol):
    """Collects the lines of a connection; None follows the last one."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.lines.put_nowait(line)
        if len(self._rest) > _LONGEST_ANSWER:
            self.lines.put_nowait(self._rest)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lines.put_nowait(None)


class RewardProcess:
    """A running reward process.

    Args:
        settings: function, arguments and limits.
        output: receives what it prints.

    Attributes:
        facts: what it reported about its function, after `start`.
        fresh: whether it has scored nothing, or only inputs that were repeated alone.
        dumps: whether its output is the stacks that `dump` asked for.
    """

    def __init__(self, settings: Settings, *, output: Output) -> None:
        self._settings = settings
        self._output = output
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroup: Path | None = None
        self._closing = contextlib.ExitStack()
        self._text = b""
        self._keys = {
            value: name
            for name, value in os.environ.items()
            if _OF_KEYS.search(name) and len(value) >= _SHORTEST_KEY
        }
        self.facts: dict[str, Any] = {}
        self.fresh = True
        self.dumps = False

    async def start(self) -> None:
        """Starts the process and imports its function.

        Raises:
            ValueError: if the function is refused.
            ProcessEnded: if the process ends before it is ready.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._pipe, write = os.pipe()
            os.set_blocking(self._pipe, False)
            self._closing.callback(os.close, self._pipe)
            try:
                self._process = self._spawn(theirs, write)
            finally:
                os.close(write)
            self._cgroup = _limit_processes(self._process.pid)
            self._pidfd = os.pidfd_open(self._process.pid)
            self._closing.callback(os.close, self._pidfd)
            self._transport, self._answers = await loop.connect_accepted_socket(
                _Answers, ours.dup()
            )
        self._closing.callback(self._transport.abort)
        loop.add_reader(self._pidfd, self._on_exit)
        self._closing.callback(loop.remove_reader, self._pidfd)
        loop.add_reader(self._pipe, self.read_output)
        self._closing.callback(loop.remove_reader, self._pipe)
        self._transport.write(message(self._settings))
        answer = await self.answer()
        if not isinstance(answer, dict):
            raise ProcessEnded(_BROKEN)
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

    def send(self, numbered: Sequence[tuple[int, RewardInput]]) -> None:
        """Sends inputs to score; if the process has ended, `answer` says how."""
        if not self._transport.is_closing():
            self._transport.write(message(list(numbered)))

    async def answer(self) -> Any:
        """The next answer.

        Raises:
            ProcessEnded: if there is none.
        """
        line = await self._answers.lines.get()
        if line is None:
            raise ProcessEnded(await asyncio.to_thread(self._how_it_ended))
        try:
            return json.loads(self._without_keys(line.decode()))
        except ValueError:
            raise ProcessEnded(_BROKEN) from None

    async def dump(self) -> None:
        """Lets the process write the stacks of its threads to its output, before it is ended."""
        self.read_output()
        self.flush_output()
        self.dumps = True
        assert self._process is not None
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(_SETTLE_S)

    def read_output(self) -> None:
        """Reads what the process has printed."""
        with contextlib.suppress(OSError):  # nothing to read, or not opened
            data = os.read(self._pipe, _CHUNK)
            if not data:
                asyncio.get_running_loop().remove_reader(self._pipe)
            self._text += data
            if len(self._text) > _CHUNK:
                self.flush_output()

    def flush_output(self) -> None:
        """Passes on what was read."""
        if self._text:
            self._output(self._without_keys(self._text.decode(errors="replace")))
        self._text = b""

    async def kill(self) -> None:
        """Ends the process and all that it has started."""
        if self._process is not None:
            await asyncio.to_thread(self._end_group)
            self.read_output()
            self.flush_output()
        self._closing.close()

    def _without_keys(self, text: str) -> str:
        """The text with names of environment variables in place of the keys that they hold.

        What a reward function prints or raises is shown, logged and copied to the mirror.
        """
        for key, name in self._keys.items():
            text = text.replace(key, f"[{name}]")
        return text

    def _on_exit(self) -> None:
        """Reports the end, also where a child process keeps the connection open."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        loop.call_later(_SETTLE_S, self._answers.lines.put_nowait, None)

    def _end_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for other in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if other.environ().get(_VARIABLE) == self._mark:
                    other.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        _remove(self._cgroup)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(_SETTLE_S)
        except subprocess.TimeoutExpired:
            return "its process closed the connection to its host"
        if status >= 0:
            return f"its process ended with status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"its process was ended by {name}"


_BROKEN = "its process wrote something else into the connection to its host"


def _remove(cgroup: Path | None) -> None:
    """Removes a cgroup once its last process is gone."""
    for _ in range(20 if cgroup is not None else 0):
        assert cgroup is not None
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # its processes have been ended, and are not gone yet
            time.sleep(_SETTLE_S / 10)
        else:
            return


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
        except OSError:
            continue
        try:
            (group / "pids.max").write_text(str(_MOST_PROCESSES))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:  # this hierarchy does not control pids
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        return group
    return None
