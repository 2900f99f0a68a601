"""When to stop: after so many steps, or early enough to evaluate and export within the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SAFETY = 1.25
"""What was measured once may take this much longer the next time."""


@dataclass
class Clock:
    """Time used by the run, earlier processes included.

    Attributes:
        started: when this process started, on the scale of `now`.
        used_before_s: what earlier processes of the run used.
        now: reads the clock, in seconds.
    """

    started: float
    used_before_s: float = 0.0
    now: Callable[[], float] = time.monotonic

    @property
    def elapsed_s(self) -> float:
        """Seconds used so far."""
        return self.used_before_s + self.now() - self.started


@dataclass
class Deadline:
    """Whether another step may start.

    Attributes:
        clock: time used.
        steps: end after this many steps; None: no such bound.
        time_s: end within this time; None: no such bound.
        reserve_s: what evaluation and export at the end will need, `SAFETY` not included.
    """

    clock: Clock
    steps: int | None
    time_s: float | None
    reserve_s: float = 0.0
    _slowest_s: float = field(default=0.0, init=False)

    def observe_step(self, seconds: float) -> None:
        """Takes note of how long a step took."""
        self._slowest_s = max(self._slowest_s, seconds)

    def allows(self, step: int) -> bool:
        """Whether step number `step`, counted from 0, can be finished in time."""
        if self.steps is not None:
            return step < self.steps
        assert self.time_s is not None
        needed = SAFETY * (self._slowest_s + self.reserve_s)
        return self.clock.elapsed_s + needed < self.time_s
