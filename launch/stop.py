"""Handling of Ctrl-C and SIGTERM for commands that must shut down in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Stop:
    """Turns Ctrl-C and SIGTERM into an event. A second Ctrl-C ends the process at once.

    Attributes:
        notice: printed when the first signal arrives.
        event: set by the first signal.
        received: the first signal.
    """

    notice: str
    event: asyncio.Event = field(default_factory=asyncio.Event)
    received: signal.Signals | None = None

    def listen(self) -> None:
        """Installs the handlers; call it again after Ray has installed its own."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on, number)

    def _on(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            print(self.notice, flush=True)
            self.event.set()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt  # the event loop cancels all tasks

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
