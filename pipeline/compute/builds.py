"""Compilation in a process: how many programs at once, progress, a summary. No JAX."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace


def cores() -> int:
    """CPU cores that this process may use: as many programs are compiled at once.

    These are the cores of its affinity mask, or all cores on a system without one, such as macOS.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Built:
    """A compiled program.

    Attributes:
        name: the program's name, such as "segment 192".
        seconds: time of compiling it, or of reading it from the cache.
        cached: whether it was in the persistent cache.
    """

    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class Ready:
    """Time and compilations to prepare a process.

    Attributes:
        load_s: seconds of loading the base model.
        built: programs compiled now; empty: all existed already.
        compiling_s: seconds that the process waited for compilations, which are now in the cache.
    """

    load_s: float = 0.0
    built: tuple[Built, ...] = ()
    compiling_s: float = 0.0


@dataclass(frozen=True)
class Building:
    """Progress of compilation.

    Attributes:
        done: compiled programs, in the order of completion.
        total: programs of the current compilation, known when it starts.
        earlier: programs of earlier compilations, the first ones of `done`.
    """

    done: tuple[Built, ...] = ()
    total: int = 0
    earlier: int = 0

    def line(self, number: int) -> str:
        """A program of `done`, counted from 0, as a line of progress."""
        built, place = self.done[number], number + 1 - self.earlier
        cached = " from the cache" if built.cached else ""
        return f"{built.name}: {built.seconds:.1f} s{cached}, {place} of {self.total}"


class BuildLog:
    """Counts programs as they are compiled. Thread-safe.

    Attributes:
        waited_s: seconds of waiting for compilations, after all programs were traced; those of
            programs that were read from the cache, or are not in it, do not count.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._lock = threading.Lock()
        self._state = Building()

    def begin(self, total: int) -> None:
        """Starts a compilation of `total` programs."""
        with self._lock:
            done = self._state.done
            self._state = Building(done, total, len(done))

    def done(self, built: Built) -> None:
        """Records a compiled program."""
        with self._lock:
            self._state = replace(self._state, done=(*self._state.done, built))

    def read(self) -> Building:
        """The progress so far."""
        with self._lock:
            return self._state


def built_facts(built: Sequence[Built]) -> dict[str, object]:
    """Compiled programs as the journal stores them."""
    return {
        "programs": {one.name: round(one.seconds, 3) for one in built},
        "program_seconds": round(sum(one.seconds for one in built), 3),
        "from_cache": sum(one.cached for one in built),
    }
