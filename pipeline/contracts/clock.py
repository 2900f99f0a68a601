"""The run's clock and a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Time used by the run, including its earlier processes.

    Attributes:
        started: start of this process, on the scale of `now`.
        used_before_s: seconds used by earlier processes of the run.
        now: reads the clock, in seconds.
        waited_s: seconds that this process has waited for devices.
    """

    started: float
    used_before_s: float = 0.0
    now: Callable[[], float] = time.monotonic
    waited_s: float = field(default=0.0, init=False)
    _stopped: float | None = field(default=None, init=False)

    @property
    def elapsed_s(self) -> float:
        """Seconds used so far."""
        until = self.now() if self._stopped is None else self._stopped
        return self.used_before_s + until - self.started

    @contextmanager
    def waiting(self, *, used: bool) -> Iterator[None]:
        """Measures the duration of its block as waiting for devices.

        Args:
            used: whether the wait counts as time used by the run.
        """
        began = self.now()
        if not used:
            self._stopped = began
        try:
            yield
        finally:
            waited_s = self.now() - began
            self.waited_s += waited_s
            if not used:
                self.started += waited_s
                self._stopped = None


class Stopwatch:
    """Measures seconds from now on.

    Args:
        now: reads the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = now()

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return self._now() - self._started
