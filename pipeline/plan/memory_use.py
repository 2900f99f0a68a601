"""What a process holds of its devices' memory, as a value that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
