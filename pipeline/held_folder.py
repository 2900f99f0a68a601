"""A folder of one process, which the next one deletes where this one was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = ".lock"


class HeldFolder:
    """A new folder that is this process's while it lives; those of processes that are gone go.

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
        # A plain descriptor: held until the process ends, and by no child of it.
        self._lock = os.open(made, os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Deletes it before the process ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_left(folder: Path) -> None:
    """Deletes it unless a process holds it, is making it, or it is somebody else's."""
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_WRONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
