"""Handling of Ctrl-C, SIGTERM and a closed terminal: commands shut down in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from launch.exits import EXIT_INTERRUPTED, say

AT_ONCE = b"stopped at once; nothing was waited for\n"

T = TypeVar("T")


def stop_signals() -> list[signal.Signals]:
    """Signals that stop a command; that of a closed terminal unless `nohup` ignores it."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


@dataclass
class Stop:
    """Turns Ctrl-C, SIGTERM and SIGHUP into an event. A Ctrl-C after it ends the process at once.

    Nothing is cleaned up then, as if the process were killed: a run folder is valid at any time,
    and what belongs to the process (cluster, W&B, temporary folders) ends without it.

    `notice` is printed when the first signal arrives.
    """

    notice: str
    event: asyncio.Event = field(default_factory=asyncio.Event)
    received: signal.Signals | None = None

    def listen(self) -> None:
        """Installs the handlers; call it again after Ray has installed its own."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            self.event.set()
            say(self.notice)
        elif number == signal.SIGINT:
            with suppress(OSError):  # the terminal is gone
                os.write(2, AT_ONCE)
            os._exit(EXIT_INTERRUPTED)

    @property
    def exit_status(self) -> int:
        """128 plus the signal's number."""
        return 128 + (self.received or signal.SIGINT)


class Stopped(Exception):  # noqa: N818  # no error
    """A signal arrived; the work was abandoned."""


async def unless(stop: Stop, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, unless a signal arrives first.

    Raises:
        Stopped: if a signal arrived; `work` is cancelled.
    """
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.event.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    raise Stopped
