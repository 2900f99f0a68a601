"""What the threads of a run share that copy and upload beside it: messages, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

LogEvent = Callable[..., None]
"""Takes the kind of an event, a message for the console, and facts for the journal."""


def from_threads(log_event: LogEvent) -> LogEvent:
    """The same function for other threads: it is called in the event loop that runs now.

    After the end of the loop nothing is logged. A full disk is reported by the run's own records.
    """
    loop = asyncio.get_running_loop()

    def log_if_possible(event: str, text: str, **facts: Any) -> None:
        with suppress(OSError):
            log_event(event, text, **facts)

    def log(event: str, text: str, **facts: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(partial(log_if_possible, event, text, **facts))

    return log


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]
