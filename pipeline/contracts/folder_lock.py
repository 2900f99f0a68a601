"""A folder of one process, which the next one deletes where this one was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = ".held-by-gemma-grpo"
"""A name that nobody else gives: what has it may be deleted."""


class HeldFolder:
    """A new folder that is this process's while it lives; those that killed ones have left go.

    The kernel lets go of a process's lock however it ends, so a folder whose lock can be taken is
    nobody's any more.

    Args:
        parent: where it is made; it has to be there.
        prefix: of its name, and of the names of those that may be deleted.

    Attributes:
        path: the folder.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Taken under another name first: nobody finds a lock that is not held yet.
        made = self.path / f"{_LOCK}-made"
        # A plain descriptor: held until the process ends, and by no program that it starts.
        self._lock = os.open(made, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            made.rename(self.path / _LOCK)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Deletes it before the process ends."""
        _remove(self.path)
        os.close(self._lock)


def _remove_if_left(folder: Path) -> None:
    """Deletes a folder that a process has held and holds no more."""
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_WRONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    """The lock last: what could not be deleted, or was made meanwhile, the next process finds."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)
        if {entry.name for entry in folder.iterdir()} <= {_LOCK}:
            shutil.rmtree(folder, ignore_errors=True)
