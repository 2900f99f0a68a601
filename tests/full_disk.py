"""Fills disks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def fill_disk(folder: Path) -> Path:
    """Fills the file system of a folder; returns the file that does."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
