"""Temporary folders that are locked by their process and deleted after its death."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = ".held-by-gemma-grpo"
"""Name of the lock file, unique to this project: a folder that contains it may be deleted."""


class LockedFolder:
    """A new folder that this process holds locked; deletes the folders of killed processes.

    The kernel releases the locks of a process however it ends, so an unlocked folder is unused.
    Those whose names have the prefix may be deleted.

    Raises:
        OSError: if it cannot be created.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        for folder in parent.glob(f"{prefix}*"):
            _remove_if_unlocked(folder)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Locked under another name first, so that no process finds an unlocked lock file.
        created = self.path / f"{_LOCK}-made"
        # A raw descriptor stays open until the process ends and is not inherited by children.
        self._lock = os.open(created, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            created.rename(self.path / _LOCK)
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Deletes the folder and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_unlocked(folder: Path) -> None:
    """Deletes a folder whose process has ended."""
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_WRONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
