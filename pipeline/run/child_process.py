"""A Python process that a run starts and talks to in JSON lines; a failure never affects the run.

The process is of a session of its own: signals from a terminal do not reach it. It ends by itself
after its stdin does, also when the run is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class ChildProcess(asyncio.SubprocessProtocol):
    """The run's end of such a process; used from one event loop and its thread."""

    def __init__(self) -> None:
        self._transport: asyncio.SubprocessTransport | None = None
        self._ended, self._exited = asyncio.Event(), asyncio.Event()
        self._unread = b""
        self._finishing = False

    @abstractmethod
    def receive(self, message: Mapping[str, Any]) -> None:
        """Takes an object that the process has sent."""

    @abstractmethod
    def lost(self) -> None:
        """Called if the process ends before the run lets it."""

    @property
    def is_connected(self) -> bool:
        """Whether the process was started and is not left alone yet."""
        return self._transport is not None

    async def spawn(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts the process.

        Args:
            module: its main module.
            arguments: of its command line.
            environment: variables beside those of the run.

        Raises:
            OSError: if that is impossible.
        """
        await asyncio.get_running_loop().subprocess_exec(
            lambda: self,
            *(sys.executable, "-m", module, *arguments),
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )

    def send(self, **message: Any) -> None:
        """Sends an object; does nothing without a process."""
        if self._transport is not None and not self._stdin.is_closing():
            # Never blocks: the buffer is unbounded if the process does not read.
            self._stdin.write(json.dumps(message).encode() + b"\n")

    async def ends_within(self, limit_s: float) -> bool:
        """Closes its stdin and waits for its end; returns false after `limit_s` seconds."""
        self._finishing = True
        self._stdin.close()
        try:
            await asyncio.wait_for(self._ended.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    async def kill(self) -> None:
        """Disconnects from the process, which is killed if it has not ended."""
        if self._transport is not None:
            self.close()
            await self._exited.wait()

    def close(self) -> None:
        """As `kill`, without waiting for its end."""
        if self._transport is not None:
            self._finishing = True
            if not self._ended.is_set():
                # Also what the process started, and is itself if it has detached by a fork.
                with suppress(ProcessLookupError):
                    os.killpg(self._transport.get_pid(), signal.SIGKILL)
            self._transport.close()
            self._transport = None

    @property
    def _stdin(self) -> asyncio.WriteTransport:
        assert self._transport is not None
        pipe = self._transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        return pipe

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.SubprocessProtocol`."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def process_exited(self) -> None:
        """See `asyncio.SubprocessProtocol`."""
        self._exited.set()

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002  # stdout's alone
        """See `asyncio.SubprocessProtocol`."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self.receive(json.loads(line))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """See `asyncio.SubprocessProtocol`."""
        if fd == 1:
            self._ended.set()
            if not self._finishing:
                self.lost()
