"""Ctrl-C and SIGTERM, for commands whose work must end in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Stop:
    """Ctrl-C and SIGTERM, turned into an event. Another Ctrl-C ends it all at once.

    Attributes:
        notice: what is said when the first signal arrives.
        event: set then.
        received: which signal it was.
    """

    notice: str
    event: asyncio.Event = field(default_factory=asyncio.Event)
    received: signal.Signals | None = None

    def listen(self) -> None:
        """Installs the handlers; to be called again after Ray has installed its own."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on, number)

    def _on(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received = number
            print(self.notice, flush=True)
            self.event.set()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt  # through the event loop, which cancels everything

    @property
    def exit_status(self) -> int:
        """128 and the signal's number."""
        return 128 + (self.received or signal.SIGINT)


class Stopped(Exception):  # noqa: N818  # not an error
    """A signal arrived; the work was abandoned."""


async def unless(stop: Stop, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless a signal comes first.

    Raises:
        Stopped: if one did.
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
