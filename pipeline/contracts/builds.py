"""What a process compiles: told while it goes on, and summed up when it is done. Knows no JAX."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Built:
    """A compiled program.

    Attributes:
        name: which one, e.g. "segment 192".
        seconds: that compiling took, or reading it from the cache.
        cached: whether it was found in the persistent cache.
    """

    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class Ready:
    """A process that can work.

    Attributes:
        load_s: seconds that loading the base took.
        built: programs that were compiled for this; none: they were there.
    """

    load_s: float = 0.0
    built: tuple[Built, ...] = ()


@dataclass(frozen=True)
class Building:
    """How far a process is.

    Attributes:
        done: programs that are compiled, in the order in which they were.
        total: programs that are known to be needed so far.
    """

    done: tuple[Built, ...] = ()
    total: int = 0


class BuildLog:
    """Notes programs as they are asked for and compiled; may be read from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = Building()

    def asked(self) -> None:
        """One more is needed."""
        with self._lock:
            self._state = Building(self._state.done, self._state.total + 1)

    def done(self, built: Built) -> None:
        """One more is there."""
        with self._lock:
            self._state = Building((*self._state.done, built), self._state.total)

    def read(self) -> Building:
        """How far it is."""
        with self._lock:
            return self._state


def built_line(built: Built, *, number: int, total: int) -> str:
    """A compiled program in words."""
    cached = " from the cache" if built.cached else ""
    return f"{built.name}: {built.seconds:.1f} s{cached}, {number} of {total} so far"


def built_facts(built: Sequence[Built]) -> dict[str, object]:
    """Compiled programs as the journal has them."""
    return {
        "programs": {one.name: round(one.seconds, 3) for one in built},
        "program_seconds": round(sum(one.seconds for one in built), 3),
        "from_cache": sum(one.cached for one in built),
    }
