"""Time: the run's clock, and the phases of a process.

Each process has a `PhaseClock`, which sums seconds by phase.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
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
        waited_s: seconds that this process has waited.
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
    def waiting(self) -> Iterator[None]:
        """Measures the duration of its block as waiting, which is not used time."""
        began = self._stopped = self.now()
        try:
            yield
        finally:
            waited_s = self.now() - began
            self.waited_s += waited_s
            self.started += waited_s
            self._stopped = None


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a process.

    Attributes:
        phase: what it does; None: nothing.
        unchanged_s: seconds since it began this, or last made progress with it.
    """

    phase: str | None = None
    unchanged_s: float = 0.0


class PhaseClock:
    """The phases of one process. Phases nest; time belongs to the innermost one. Thread-safe.

    One thread, or one task of an event loop, enters and leaves phases; others may read.

    Args:
        now: reads the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._since_s = self._progress_s = 0.0
        self._phases: list[str] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def current(self) -> str | None:
        """The phase now; None: none."""
        with self._lock:
            return self._phases[-1] if self._phases else None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Makes the body a phase."""
        with self._lock:
            self._count()
            self._phases.append(phase)
            self._progress_s = self._since_s
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._phases.pop()
                self._progress_s = self._since_s

    def progress(self) -> None:
        """Notes that the innermost phase goes on; see `Heartbeat.unchanged_s`."""
        with self._lock:
            self._progress_s = self.now()

    def heartbeat(self) -> Heartbeat:
        """What the process does now."""
        with self._lock:
            if not self._phases:
                return Heartbeat()
            return Heartbeat(self._phases[-1], self.now() - self._progress_s)

    def add(self, phase: str, seconds: float) -> None:
        """Adds time that was measured otherwise."""
        with self._lock:
            self._seconds[phase] += seconds

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase since the last call; the phase under way counts to now."""
        with self._lock:
            self._count()
            found, self._seconds = self._seconds, defaultdict(float)
        return dict(found)

    def _count(self) -> None:
        """Adds the time since the last call to the innermost phase."""
        now_s = self.now()
        if self._phases:
            self._seconds[self._phases[-1]] += now_s - self._since_s
        self._since_s = now_s
