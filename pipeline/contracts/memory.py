"""Out-of-memory errors and memory use as values that cross process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.contracts.sizes import WorkerPhase


class OutOfMemory(Exception):  # noqa: N818  # asks for smaller sizes, like a signal
    """A process ran out of device or host memory; it is alive.

    Attributes:
        phase: activity of the process.
        what: the error, one line.
        share: available memory as a share of the required memory; None: unknown.
    """

    def __init__(self, phase: WorkerPhase, what: str, share: float | None = None) -> None:
        super().__init__(phase, what, share)
        self.phase = phase
        self.what = what
        self.share = share

    def __str__(self) -> str:
        return f"out of memory ({self.phase}): {self.what}"


class NothingSmaller(OutOfMemory):
    """Out of memory, and there are no smaller sizes to continue with; `what` is a sentence."""

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of the fullest device of a process.

    Attributes:
        programs: bytes during each program, by name: all current arrays plus the program's
            temporaries as reported by the compiler.
        peak: peak bytes in use, as reported by the device; None: it reports none, such as a CPU.
        limit: bytes that may be used, as reported by the device; None: it reports none.
        arrays: bytes of all current arrays.
    """

    programs: Mapping[str, int]
    peak: int | None = None
    limit: int | None = None
    arrays: int = 0
