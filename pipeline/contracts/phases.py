"""Phases: what a process does at each time. The goodput ledger is made of them (`run/ledger.py`).

Each process has a `PhaseClock`. Its spans are on one time scale for all processes: unix seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

STALL_S, STALL_CPU = 3.0, 0.05
"""A process stalled if it did not run for so many seconds: it was stopped, or swapped out. One that
used more than this share of a processor meanwhile was busy."""
_TICK_S = 0.5

_UNIX_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Unix seconds that never go backwards in a process."""
    return _UNIX_S + time.monotonic()


@dataclass(frozen=True)
class Span:
    """Time that a process spent in a phase.

    Attributes:
        phase: name of the activity.
        start_s: unix seconds.
        end_s: unix seconds.
        spare: share of the span without useful work: empty slots of decoding, padding of an update;
            of compilation the share of reading programs from the cache.
    """

    phase: str
    start_s: float
    end_s: float
    spare: float = 0.0


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a process.

    Attributes:
        phase: what it does; None: nothing.
        unchanged_s: seconds since it began this, or last made progress with it.
    """

    phase: str | None = None
    unchanged_s: float = 0.0


@dataclass(eq=False)  # two blocks of one phase are not the same block
class _Block:
    """A phase that is under way, and its spans so far."""

    phase: str
    spare: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def take(self) -> list[Span]:
        """Its spans since the last call."""
        found = [replace(span, spare=self.spare) for span in self.spans]
        self.spans.clear()
        return found


class PhaseClock:
    """The phases of one process. Phases nest; time belongs to the innermost one. Thread-safe.

    One thread, or one task of an event loop, enters and leaves phases; others may read.

    Args:
        now: reads the clock, in unix seconds.

    Attributes:
        now: the same.
    """

    def __init__(self, now: Callable[[], float] = unix_s) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._since_s = 0.0
        self._progress_s = 0.0
        self._blocks: list[_Block] = []
        self._ended: list[Span] = []

    @property
    def current(self) -> str | None:
        """The phase now; None: none."""
        with self._lock:
            return self._blocks[-1].phase if self._blocks else None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Makes the body a phase."""
        block = _Block(phase)
        with self._lock:
            self._cut()
            self._blocks.append(block)
            self._progress_s = self.now()
        try:
            yield
        finally:
            with self._lock:
                self._cut()
                self._blocks.remove(block)
                self._ended += block.take()
                self._progress_s = self.now()

    def progress(self) -> None:
        """Notes that the innermost phase goes on; see `Heartbeat.unchanged_s`."""
        with self._lock:
            self._progress_s = self.now()

    def heartbeat(self) -> Heartbeat:
        """What the process does now."""
        with self._lock:
            if not self._blocks:
                return Heartbeat()
            return Heartbeat(self._blocks[-1].phase, self.now() - self._progress_s)

    def set_spare(self, share: float) -> None:
        """Sets `Span.spare` of the innermost phase."""
        with self._lock:
            self._blocks[-1].spare = share

    def add(self, span: Span) -> None:
        """Adds a span that was measured otherwise."""
        with self._lock:
            self._ended.append(span)

    def take(self) -> list[Span]:
        """Returns the spans since the last call, up to now, in the order of time."""
        with self._lock:
            self._cut()
            found = self._ended + [span for block in self._blocks for span in block.take()]
            self._ended = []
        return sorted(found, key=lambda span: span.start_s)

    def watch_for_stalls(self) -> None:
        """Records from now on, in a thread, when this process does not run (`STALL_S`).

        Not while it starts: imports and Ray's start block all threads of Python as well.
        """
        threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def _watch(self) -> None:
        last_s, last_cpu_s = self.now(), time.process_time()
        while True:
            time.sleep(_TICK_S)
            now_s, cpu_s = self.now(), time.process_time()
            self.tick(last_s, now_s, cpu_s=cpu_s - last_cpu_s)
            last_s, last_cpu_s = now_s, cpu_s

    def tick(self, last_s: float, now_s: float, *, cpu_s: float) -> None:
        """Records a stall if two ticks of the watching thread are far apart.

        Args:
            last_s: the former tick, unix seconds.
            now_s: this tick.
            cpu_s: processor seconds that the process used in between.
        """
        if now_s - last_s >= STALL_S and cpu_s < STALL_CPU * (now_s - last_s):
            self.add(Span("stalled", last_s, now_s))

    def _cut(self) -> None:
        """Ends the span of the innermost phase."""
        now_s = self.now()
        if self._blocks and now_s > self._since_s:
            block = self._blocks[-1]
            block.spans.append(Span(block.phase, self._since_s, now_s))
        self._since_s = now_s
