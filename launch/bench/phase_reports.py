"""Imported in a process of a run, reports its phases as they begin to the socket in `VARIABLE`.

A datagram is a pid and a phase of `pipeline.contracts.phases`; where nobody reads, it is lost.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipeline.contracts.phases import PhaseClock

VARIABLE = "GEMMA_GRPO_PHASE_REPORTS"
"""Environment variable with the path of a Unix datagram socket."""
_during = PhaseClock.during


def _report(clock: PhaseClock) -> None:
    with suppress(OSError):
        _SOCKET.sendto(f"{os.getpid()} {clock.current}".encode(), os.environ[VARIABLE])


@contextmanager
def _reported(clock: PhaseClock, phase: str) -> Iterator[None]:
    """As `PhaseClock.during`."""
    try:
        with _during(clock, phase):
            _report(clock)
            yield
    finally:
        _report(clock)


if VARIABLE in os.environ:
    _SOCKET = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _SOCKET.setblocking(False)
    PhaseClock.during = _reported  # type: ignore[method-assign, assignment]
