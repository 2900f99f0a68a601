"""JAX's persistent cache of compiled programs, safe with several processes and killed ones.

JAX writes an entry in place: a process that is killed meanwhile would leave a truncated entry
forever. So entries are written into a folder per process, which has the shared entries as hard
links, and complete entries are moved to the shared folder. Used inside actors only.
"""

from __future__ import annotations

import os
import shutil
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from pipeline.run.cache_folder import cache_folder
from pipeline.run.folder_lock import LockedFolder

MOST_BYTES = 4 * 2**30
"""Size above which the oldest programs are deleted."""

_SUFFIX = "-cache"


class ProgramCache:
    """One process's view of the shared cache.

    Args:
        shared: the folder of all processes; created if it does not exist.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        own_folders = shared / "processes"
        own_folders.mkdir(parents=True, exist_ok=True)
        self._own = LockedFolder(own_folders, prefix="")
        self._names = set[str]()  # entries that are or were shared
        self.fetch()

    @property
    def path(self) -> Path:
        """The folder in which this process's JAX reads and writes."""
        return self._own.path

    def fetch(self) -> None:
        """Makes entries available that other processes have shared."""
        for entry in self._shared.glob(f"*{_SUFFIX}"):
            if entry.name not in self._names:
                self._link(entry)

    def share(self) -> None:
        """Moves new entries to the shared folder; call it between compilations."""
        for entry in self.path.glob(f"*{_SUFFIX}"):
            if entry.name not in self._names:
                if _is_whole(entry):
                    self._link(entry.replace(self._shared / entry.name))
                else:
                    entry.unlink()  # JAX would not write it again
        self._prune()

    def _link(self, entry: Path) -> None:
        """Links a shared entry into this process's folder, where it survives deletion by others.

        A hard link: JAX would write through a dangling symbolic link into the shared folder.
        """
        own = self.path / entry.name
        with suppress(FileNotFoundError):  # another process has deleted it
            try:
                own.hardlink_to(entry)
            except OSError:  # the file system has no hard links
                shutil.copyfile(entry, own)
            self._names.add(entry.name)

    def _prune(self) -> None:
        entries = []
        for entry in self._shared.glob(f"*{_SUFFIX}"):
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue  # another process has deleted it
            entries.append((found.st_mtime, found.st_size, entry))
        total = sum(size for _, size, _ in entries)
        for _, size, entry in sorted(entries):
            if total <= MOST_BYTES:
                return
            entry.unlink(missing_ok=True)
            total -= size


def _is_whole(entry: Path) -> bool:
    """Whether the compressed data of an entry have an end: on a full disk JAX writes a part."""
    data = zlib.decompressobj()
    try:
        data.decompress(entry.read_bytes())
    except zlib.error:
        return True  # compressed otherwise
    return data.eof


@cache
def _of_this_process() -> ProgramCache | None:
    """The cache; None if the user has set JAX's own, or the folder cannot be written."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    try:
        return ProgramCache(cache_folder("xla"))
    except OSError:
        return None


def use_program_cache() -> None:
    """Makes JAX use the cache."""
    import jax

    programs = _of_this_process()
    if programs is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(programs.path))
    # All programs: a run has a few dozen, and small ones add up on a slow machine.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # XLA's own caches would be keyed by the path, which differs between processes.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def share_programs() -> None:
    """See `ProgramCache.share`; does nothing without a cache, or if its disk is full."""
    programs = _of_this_process()
    if programs is not None:
        with suppress(OSError):
            programs.share()
