"""JAX's persistent compilation cache, where several processes and killed ones cannot spoil it.

JAX writes an entry in place: a process that is killed meanwhile would leave half of one for good.
So each process lets JAX write into a folder of its own, which has the shared entries as hard links,
and what is whole there is moved among those. Used inside actors only.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

from pipeline.contracts.cache_folder import cache_folder
from pipeline.contracts.folder_lock import LockedFolder

MOST_BYTES = 4 * 2**30
"""Beyond this the oldest programs are deleted."""

_SUFFIX = "-cache"


class ProgramCache:
    """One process's view of the shared cache.

    Args:
        shared: the folder that all share; made if it is not there.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        own_folders = shared / "processes"
        own_folders.mkdir(parents=True, exist_ok=True)
        self._own = LockedFolder(own_folders, prefix="")
        self._names = set[str]()  # of entries that are shared, or were
        for entry in shared.glob(f"*{_SUFFIX}"):
            self._link(entry)

    @property
    def path(self) -> Path:
        """Where this process's JAX reads and writes."""
        return self._own.path

    def share(self) -> None:
        """Moves what was compiled since to where all find it; to be called between compilations."""
        for entry in self.path.glob(f"*{_SUFFIX}"):
            if entry.name not in self._names:
                self._link(entry.replace(self._shared / entry.name))
        self._prune()

    def _link(self, entry: Path) -> None:
        """Gives this process a shared entry, which stays its own when another deletes it.

        JAX would write through a symbolic link to nothing, among the shared entries.
        """
        own = self.path / entry.name
        with suppress(FileNotFoundError):  # another process has deleted it
            try:
                own.hardlink_to(entry)
            except OSError:  # not on this file system
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


@cache
def _of_this_process() -> ProgramCache | None:
    """None: what the user chose for JAX stands, or the folder cannot be written."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    try:
        return ProgramCache(cache_folder("xla"))
    except OSError:
        return None


def use_program_cache() -> None:
    """Lets JAX look for programs before it compiles them."""
    import jax

    programs = _of_this_process()
    if programs is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(programs.path))
    # All of them: a run has a few dozen, and small ones add up where the machine is slow.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # XLA's own would be keyed by a path that each process has another one of.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def share_programs() -> None:
    """See `ProgramCache.share`; does nothing without a cache."""
    programs = _of_this_process()
    if programs is not None:
        programs.share()
