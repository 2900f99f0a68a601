"""Time: how much is used, when to stop so that evaluation and export fit, what a step spends."""

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
        reserve_s: what the export at the end will need, `SAFETY` not included.
        evaluations_s: what the evaluations at the end will need, likewise.
    """

    clock: Clock
    steps: int | None
    time_s: float | None
    reserve_s: float = 0.0
    evaluations_s: float = 0.0
    _slowest_s: float = field(default=0.0, init=False)

    def observe_step(self, seconds: float) -> None:
        """Takes note of how long a step took."""
        self._slowest_s = max(self._slowest_s, seconds)

    def allows(self, step: int) -> bool:
        """Whether step number `step`, counted from 0, can be finished in time."""
        if self.steps is not None:
            return step < self.steps
        assert self.time_s is not None
        needed = SAFETY * (self._slowest_s + self.evaluations_s + self.reserve_s)
        return self.clock.elapsed_s + needed < self.time_s


class Stopwatch:
    """Seconds by part of a step.

    Args:
        now: reads the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = self._last = now()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends the part that began at the last lap; laps of one name are added up."""
        now = self._now()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        """Seconds so far."""
        return self._now() - self._started

    def metrics(self) -> dict[str, float]:
        """`time/PART_s` and, from the start to the last lap, `time/step_s`."""
        laps = {f"time/{name}_s": seconds for name, seconds in self._laps.items()}
        return {**laps, "time/step_s": self._last - self._started}
