"""Damages files as failing disks, full disks and people do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def damages(content: bytes, *, flips: int = 4, seed: int = 0) -> Iterator[tuple[str, bytes | None]]:
    """Names and results of damages of a file; None: it is removed.

    Args:
        content: of the file.
        flips: number of results with one bit flipped, each at another place.
        seed: of the places.
    """
    yield "removed", None
    yield "emptied", b""
    yield "truncated", content[: len(content) * 2 // 3]
    yield "zeroed", bytes(len(content))
    lines = content.splitlines(keepends=True)
    if len(lines) > 3:
        yield "without its last line", b"".join(lines[:-1])
        yield "without its second half", b"".join(lines[: len(lines) // 2])
        yield "without a line", b"".join(lines[:1] + lines[2:])
    rng = random.Random(seed)
    for _ in range(flips if content else 0):
        at, bit = rng.randrange(len(content)), rng.randrange(8)
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        yield f"with bit {bit} of byte {at} flipped", bytes(flipped)


def fill_disk(folder: Path) -> Path:
    """Fills the file system of a folder; returns the file that does."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
