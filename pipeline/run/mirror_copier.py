"""Copies states of a run folder to a mirror.

A state is what a `kill -9` at one instant would leave: a copy is taken of what has changed, and
taken again if anything changed meanwhile. So a host that fetches it resumes as after a kill.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contracts.record_files import time_stamp
from pipeline.run.mirror_store import (
    STAGED,
    Manifest,
    Store,
    Stored,
    is_mirrored,
    newest_checkpoint,
    sha256_of,
)

JOURNAL = "journal.jsonl"
MOST_PROGRAM_BYTES = 2**30
"""Compiled programs that are copied: the newest ones, up to this size."""
_LOCK = ".lock"
"""Has the time used; it is written every few seconds, and changes no state."""
_OUTPUT = "rewards.log"
"""Grows as often as reward functions print; a resume reads nothing from it."""
_TRIES = 20
_PROGRAM = "*-cache"

Stamp = tuple[int, int, int]
"""Inode, size and time of change of a file in nanoseconds."""


class BusyFolderError(Exception):
    """The run folder changes faster than its state can be taken."""


class OtherRunError(Exception):
    """The mirror has what this run folder does not have."""


@dataclass
class State:
    """A state of the run folder.

    Attributes:
        stamps: of its files, by path relative to the run folder.
        staged: where the content of changed files is, and of the lock.
    """

    stamps: dict[str, Stamp]
    staged: dict[str, Path] = field(default_factory=dict)


def scan(folder: Path) -> dict[str, Stamp]:
    """The files of a run folder that a mirror has, without its lock."""

    def below(place: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        with suppress(FileNotFoundError), os.scandir(place) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if not is_mirrored(path) or path == _LOCK:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from below(entry.path, f"{path}/")
                elif entry.is_file(follow_symlinks=False):
                    yield path, entry

    found = {}
    for path, entry in below(str(folder), ""):
        with suppress(FileNotFoundError):
            facts = entry.stat(follow_symlinks=False)
            found[path] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return found


def take_state(folder: Path, known: Mapping[str, Stamp]) -> State:
    """Takes the state of a run folder at one instant.

    Args:
        folder: the run folder.
        known: files whose content is known.

    Raises:
        BusyFolderError: if it changes faster.
    """
    staging = folder / STAGED
    for _ in range(_TRIES):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        state = State(scan(folder))
        changed = [path for path, stamp in state.stamps.items() if known.get(path) != stamp]
        with suppress(FileNotFoundError):
            for number, path in enumerate(changed):
                state.staged[path] = _stage(folder / path, staging / str(number))
            lock = folder / _LOCK
            if lock.is_file():
                shutil.copyfile(lock, staging / _LOCK)
                state.staged[_LOCK] = staging / _LOCK
        if _state_of(scan(folder)) == _state_of(state.stamps):
            return state
    raise BusyFolderError(f"{folder} changes faster than it can be copied")


def _state_of(stamps: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """The stamps of the files that belong to the state of the run."""
    return {path: stamp for path, stamp in stamps.items() if path != _OUTPUT}


def _stage(file: Path, staged: Path) -> Path:
    """Keeps the content of a file: a link, which outlives its deletion; of a record file, a copy.

    Files in subfolders are written once or replaced; those beside them are appended to.
    """
    if file.parent != staged.parents[1]:
        with suppress(OSError):  # the file system has no hard links
            staged.hardlink_to(file)
            return staged
    shutil.copyfile(file, staged)
    return staged


def machine_of(platform_name: str) -> str:
    """For which machines programs are compiled: those of a CPU for its instructions, too.

    The cache's keys tell accelerators apart, but not CPUs.
    """
    if platform_name != "cpu":
        return f"{platform_name} {platform.machine()}"
    flags = b""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n")
        flags = next((line for line in lines if line.startswith(b"flags")), b"")
    return f"cpu {platform.machine()} {hashlib.sha256(flags).hexdigest()[:12]}"


def continues(folder: Path, manifest: Manifest) -> bool:
    """Whether a run folder has all that a manifest's journal has; the journal only grows."""
    mirrored = manifest.files.get(JOURNAL)
    if mirrored is None:
        return True
    try:
        with (folder / JOURNAL).open("rb") as journal:
            return hashlib.sha256(journal.read(mirrored.bytes)).hexdigest() == mirrored.sha256
    except FileNotFoundError:
        return False


def other_run(folder: Path, store: Store, manifest: Manifest) -> str:
    """The sentence for a mirror that has what a run folder lacks."""
    return (
        f"{store.url} ({manifest.origin}) has a journal that {folder} does not continue: the run "
        "went on elsewhere, or this folder is damaged or of another run. To continue what is "
        f"in the mirror move {folder} away; to continue this folder set another run.mirror"
    )


class Copier:
    """Copies the states of one run folder.

    Args:
        folder: the run folder.
        store: of its mirror.
        programs: folder of compiled programs.
        machine: see `machine_of`.
        guard: raises if another process may write to the mirror.

    Attributes:
        left: files and bytes that the copy under way has still to store.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        programs: Path,
        machine: str,
        guard: Callable[[], None],
    ) -> None:
        self._folder, self._store = folder, store
        self._programs, self._machine = programs, machine
        self._guard = guard
        self._last: Manifest | None = None
        self._stamps: dict[str, Stamp] = {}
        self._stored: dict[str, Stored] = {}
        self._compiled: dict[str, Stored] = {}
        self._sizes: dict[str, int] | None = None
        self.left = (0, 0)

    def is_current(self) -> bool:
        """Whether the mirror has the run folder as it is now, and the programs."""
        return (
            self._last is not None
            and self._last.programs == self._compiled
            and scan(self._folder) == self._stamps
        )

    def copy(self) -> Manifest:
        """Copies the state as it is now; returns its manifest.

        Raises:
            OtherRunError: if the mirror has a state that is not an earlier one of this folder.
            BusyFolderError: see `take_state`.
            Exception: what the store raises; the next call continues.
        """
        try:
            return self._copy()
        except BaseException:
            self._sizes = None  # what is stored has to be looked up
            raise
        finally:
            shutil.rmtree(self._folder / STAGED, ignore_errors=True)

    def _copy(self) -> Manifest:
        time = time_stamp()
        state = take_state(self._folder, self._stamps)
        before = self._store.newest()
        if before is not None and before != self._last:
            if not continues(self._folder, before):
                raise OtherRunError(other_run(self._folder, self._store, before))
            if before.machine == self._machine:
                self._compiled = {**before.programs, **self._compiled}
        stored = self._put_files(state)
        manifest = Manifest(
            1 if before is None else before.number + 1,
            stored,
            host=socket.gethostname(),
            time=time,
            checkpoint=newest_checkpoint(stored),
            programs=dict(self._compiled),
            machine=self._machine,
        )
        self._guard()
        self._store.publish(manifest)
        self._guard()
        self._sizes = self._store.prune(manifest)
        self._stamps, self._stored, self._last = state.stamps, stored, manifest
        return manifest

    def _put_files(self, state: State) -> dict[str, Stored]:
        """Stores the contents of a state that are not stored yet."""
        stored = {path: self._stored[path] for path in state.stamps if path not in state.staged}
        new = {path: _content(file) for path, file in state.staged.items()}
        missing = {
            path: one for path, one in new.items() if self._sizes_now().get(one.sha256) != one.bytes
        }
        count, size = len(missing), sum(one.bytes for one in missing.values())
        for path, one in missing.items():
            self.left = (count, size)
            self._put(state.staged[path], one)
            count, size = count - 1, size - one.bytes
        self.left = (0, 0)
        return {**stored, **new}

    def copy_programs(self) -> None:
        """Stores compiled programs; the next manifest names them."""
        for file in _newest_programs(self._programs):
            if file.name in self._compiled:
                continue
            with suppress(FileNotFoundError):  # the cache is pruned by its users
                one = _content(file)
                if self._sizes_now().get(one.sha256) != one.bytes:
                    self._put(file, one)
                self._compiled[file.name] = one

    def _put(self, file: Path, content: Stored) -> None:
        self._store.put(file, content.sha256)
        self._sizes_now()[content.sha256] = content.bytes

    def _sizes_now(self) -> dict[str, int]:
        if self._sizes is None:
            self._sizes = self._store.sizes()
        return self._sizes


def _content(file: Path) -> Stored:
    return Stored(file.stat().st_size, sha256_of(file))


def _newest_programs(folder: Path) -> list[Path]:
    """The newest programs up to `MOST_PROGRAM_BYTES`."""
    found = []
    for file in folder.glob(_PROGRAM):
        with suppress(FileNotFoundError):
            facts = file.stat()
            found.append((facts.st_mtime_ns, facts.st_size, file))
    chosen, total = [], 0
    for _, size, file in sorted(found, reverse=True):
        total += size
        if total > MOST_PROGRAM_BYTES:
            break
        chosen.append(file)
    return chosen
