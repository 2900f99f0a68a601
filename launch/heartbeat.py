"""Heartbeats of a run's process to its supervisor, through a pipe."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress

PIPE = "GEMMA_GRPO_HEARTBEATS"
"""Environment variable with the descriptor of the pipe."""
_EVERY_S = 1.0


def send_heartbeats(loop: asyncio.AbstractEventLoop, *, stuck_s: float) -> None:
    """Sends a heartbeat every second to the supervisor, if there is one, until the loop is closed.

    A process that is stopped or deadlocked sends none, nor one whose event loop is stuck.

    Args:
        loop: runs in another thread.
        stuck_s: seconds after which a loop that runs no callback is stuck.
    """
    pipe = os.environ.get(PIPE)
    if pipe is None:
        return
    ran_s = time.monotonic()

    def ran() -> None:
        nonlocal ran_s
        ran_s = time.monotonic()

    def send() -> None:
        # The supervisor is gone, or the loop is closed.
        with suppress(OSError, RuntimeError):
            while True:
                loop.call_soon_threadsafe(ran)
                if time.monotonic() - ran_s < stuck_s:
                    os.write(int(pipe), b".")
                time.sleep(_EVERY_S)

    threading.Thread(target=send, name="heartbeats", daemon=True).start()


def has_beaten(pipe: int) -> bool:
    """Whether there are new heartbeats in the supervisor's end of the pipe; reads them."""
    with suppress(BlockingIOError):
        return bool(os.read(pipe, 1 << 16))
    return False
