"""Running out of memory as a value that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.contracts.sizes import Phase


class OutOfMemory(Exception):  # noqa: N818  # asks for smaller sizes, like a signal
    """A process ran out of memory, on a device or beside it; it is alive and as it was before.

    Attributes:
        phase: what it was doing.
        what: what it was told, one line.
        share: of what it needed so much was there; None: that is not known.
    """

    def __init__(self, phase: Phase, what: str, share: float | None = None) -> None:
        super().__init__(phase, what, share)
        self.phase = phase
        self.what = what
        self.share = share

    def __str__(self) -> str:
        return f"out of memory ({self.phase}): {self.what}"


class NothingSmaller(OutOfMemory):
    """Out of memory, and there are no smaller sizes to go on with; `what` is a sentence."""

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class MemoryUse:
    """Of the fullest device of a process.

    Attributes:
        programs: bytes while each of its programs runs, by name: all arrays that are there now, and
            what the compiler says that the program takes beside them.
        peak: the most bytes that were in use so far, by the device's own account; None: it keeps
            none, as on a CPU.
        limit: bytes that may be used, likewise.
    """

    programs: Mapping[str, int]
    peak: int | None = None
    limit: int | None = None
