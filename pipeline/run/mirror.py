"""The mirror of a run: a copy of its folder elsewhere, which a host without the folder fetches.

MIRROR/NAME has the paths of the run folder. A copy writes what the records refer to, then the
records, then the checkpoints, Orbax's mark of each last: wherever it is cut, a checkpoint with this
mark is complete and has its records.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem
from tqdm import tqdm

from configs.schema import Config
from pipeline.run.checkpoint_files import CHECKPOINT_MARK
from pipeline.run.run_folder import RunFolder
from pipeline.run.threads import LogEvent, first_line, from_threads

FINISH_S = 60.0
"""Time limit in seconds for the last copy, after the devices are released."""
_LEFT_OUT = frozenset({"status.json", "wandb", "profile"})
"""What no resume and no result needs."""
_UNFINISHED = re.compile(r".*\.(tmp|partial|replaced)|.*\.orbax-checkpoint-tmp.*")
_LOCAL = ("", "file", "local")
"""Schemes of paths on this host."""

Stamp = tuple[int, float]
"""Size of a file, and time of its change in seconds since 1970."""

# It prints a traceback of each failure, which is raised, too.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


class Store:
    """A folder at a URL. Its methods raise what the library of the protocol raises.

    Args:
        url: of the folder, which need not exist.

    Raises:
        ValueError: if the protocol is unknown.
        ImportError: if its library is not installed.
    """

    def __init__(self, url: str) -> None:
        self._is_local = _is_local(url)
        options: dict[str, Any] = {"auto_mkdir": True} if self._is_local else {}
        fs, root = fsspec.url_to_fs(url, **options)
        self._fs: AbstractFileSystem = fs
        self._root = str(root).rstrip("/")

    def sizes(self) -> dict[str, int]:
        """The sizes of its files, by path."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            name.removeprefix(f"{self._root}/"): int(entry["size"] or 0)
            for name, entry in found.items()
            if name.startswith(f"{self._root}/") and not name.endswith("/")
        }

    def write(self, path: str, content: bytes | Path) -> None:
        """Replaces a file, which is never seen half written."""
        target = f"{self._root}/{path}"
        written = f"{target}.partial" if self._is_local else target
        if isinstance(content, bytes):
            self._fs.pipe_file(written, content)
        else:
            self._fs.put_file(str(content), written)
        if self._is_local:
            Path(written).replace(target)

    def read(self, path: str, file: Path) -> None:
        """Fetches a file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(f"{self._root}/{path}", str(file))

    def delete(self, path: str) -> None:
        """Deletes a file."""
        self._fs.rm_file(f"{self._root}/{path}")


class Copier:
    """Copies what is new in a run folder.

    Of the files that an earlier process has copied only those are new that may have been replaced.

    Args:
        folder: the run folder.
        url: MIRROR/NAME.

    Raises:
        Exception: what the store raises.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._store = folder, Store(url)
        here = _scan(folder)
        self._copied: dict[str, Stamp | None] = {
            path: here[path] if _is_final(path) and path in here and here[path][0] == size else None
            for path, size in self._store.sizes().items()
        }

    def copy(self) -> None:
        """Copies new and changed files, then deletes what the run folder no longer has.

        Retention may delete a checkpoint meanwhile: what is left is for the next call.

        Raises:
            Exception: what the store raises; the next call continues.
        """
        try:
            self._copy()
        except FileNotFoundError as error:
            if not Path(str(error.filename)).is_relative_to(self._folder):
                raise  # of the store

    def _copy(self) -> None:
        before = _scan(self._folder)
        # Read after the checkpoints were found, and before what the records refer to.
        records = {path: (self._folder / path).read_bytes() for path in before if "/" not in path}
        found = _scan(self._folder)
        others = sorted(path for path in found if "/" in path and not _is_checkpoint(path))
        checkpoints = sorted(filter(_is_checkpoint, before), key=_place)
        stamps = {**found, **before}
        for path in (*others, *sorted(records), *checkpoints):
            if self._copied.get(path) != stamps[path]:
                self._store.write(path, records.get(path, self._folder / path))
                self._copied[path] = stamps[path]
        for path in sorted(self._copied.keys() - found.keys(), key=_place, reverse=True):
            self._store.delete(path)
            del self._copied[path]


class Mirror:
    """Copies a run folder in a thread; this never blocks the run, nor fails it.

    Args:
        url: MIRROR/NAME; None: there is no mirror, and every call does nothing.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._finishes = self._is_complete = False
        self._log_event: LogEvent

    def start(self, folder: Path, *, log_event: LogEvent) -> None:
        """Starts the thread, which copies at once what is there.

        Args:
            folder: the run folder.
            log_event: writes an event to journal and console; called in the thread of the caller's
                event loop.
        """
        if self.url is None:
            return
        self._log_event, serve = from_threads(log_event), partial(self._serve, folder, self.url)
        self._thread = threading.Thread(target=serve, name="mirror", daemon=True)
        self._thread.start()
        self.request()

    def request(self) -> None:
        """Asks for a copy; requests during a copy become one."""
        self._asked.set()

    async def finish(self) -> None:
        """Waits up to `FINISH_S` for a last copy; logs if it is not complete."""
        if self._thread is None:
            return
        self._finishes = True
        self.request()
        await asyncio.to_thread(self._thread.join, FINISH_S)
        if not self._is_complete:
            self._say(
                "the end of the run could not be copied; the same command continues the copy from "
                "this host"
            )
        await asyncio.sleep(0)  # for the thread's messages, and this one

    def _say(self, text: str) -> None:
        self._log_event("mirror", f"mirror {self.url}: {text}", what=text)

    def _serve(self, folder: Path, url: str) -> None:
        """Copies at each request, until `finish`; the function of the thread."""
        copier, finishes = None, False
        while not finishes:
            self._asked.wait()
            self._asked.clear()
            finishes = self._finishes
            try:
                copier = copier or Copier(folder, url)
                copier.copy()
            except Exception as error:  # noqa: BLE001  # of any library of a store
                why = first_line(error)
                self._say(f"cannot be written ({why}); the next checkpoint tries again")
            else:
                self._is_complete = finishes


# --- the run folder


def _scan(folder: Path) -> dict[str, Stamp]:
    """The files of a run folder that a mirror has."""
    found = {}
    for parent, folders, names in os.walk(folder):
        place = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if _is_mirrored((place / name).as_posix())]
        for path in (place / name for name in names):
            with suppress(FileNotFoundError):
                facts = (folder / path).lstat()
                if stat.S_ISREG(facts.st_mode) and _is_mirrored(path.as_posix()):
                    found[path.as_posix()] = (facts.st_size, facts.st_mtime)
    return found


def _is_mirrored(path: str) -> bool:
    """Whether a mirror has a file or folder of a run folder, by its relative path."""
    parts = path.split("/")
    return parts[0] not in _LEFT_OUT and not any(map(_UNFINISHED.fullmatch, parts))


def _is_checkpoint(path: str) -> bool:
    return path.startswith("checkpoints/")


def _is_final(path: str) -> bool:
    """Whether a file is never replaced by another of the same size."""
    parts = path.split("/")
    if parts[0] == "rollouts":  # later answers of a test may replace the earlier ones
        return parts[-1].startswith(("step_", "sft_"))
    return _is_checkpoint(path) and parts[1].isdecimal()


def _place(path: str) -> tuple[int, bool, str]:
    """The newest checkpoint first, its mark last; the best adapter after all checkpoints."""
    parts = path.split("/")
    step = int(parts[1]) if _is_checkpoint(path) and parts[1].isdecimal() else -1
    return -step, parts[-1] == CHECKPOINT_MARK, path


# --- the start


def mirror_url(config: Config) -> str | None:
    """MIRROR/NAME of a configuration; None without a mirror."""
    return None if config.run.mirror is None else f"{config.run.mirror}/{config.run.name}"


def _is_local(url: str) -> bool:
    return urlsplit(url).scheme in _LOCAL


def check_mirror(mirror: str, run: Path) -> None:
    """Checks `run.mirror` without keys: a submitted job may have others.

    Args:
        mirror: its value.
        run: the run folder.

    Raises:
        ValueError: if its protocol has no library here, or it is a folder of this host that does
            not exist (an unmounted disk), or in which the copy would be the run folder.
    """
    if not _is_local(mirror):
        try:
            fsspec.get_filesystem_class(mirror.partition("://")[0])
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"run.mirror = {mirror}: {error}; `make install-mirror` installs the libraries of "
                "s3:// and gs://"
            ) from None
        return
    here, run = Path(mirror.partition("://")[2] or mirror).resolve(), run.resolve()
    if not here.is_dir():
        raise ValueError(f"run.mirror: there is no folder {here}; create or mount it")
    if here == run.parent or here.is_relative_to(run):
        raise ValueError(
            f"run.mirror: the copy in {here} and the run folder {run} would contain each other; "
            "name a folder on another disk"
        )


def fetch_run(config: Config, *, say: Callable[[str], None]) -> None:
    """Fetches the run from its mirror if this host has none.

    Args:
        config: of the run.
        say: shows a line.

    Raises:
        ValueError: if the run cannot be fetched, or if there is none and the mirror cannot be
            written.
    """
    folder, url = RunFolder.of(config), mirror_url(config)
    if url is None or folder.holds_run:
        return
    check_mirror(str(config.run.mirror), folder.path)
    try:
        store = Store(url)
        sizes = store.sizes()
        if "config.json" in sizes:
            folder.check(config)  # refuses a folder with other content
            say(f"fetching the run from {url}")
            _fetch(folder, store, sizes)
        else:
            store.write(".writable", b"-")
            store.delete(".writable")
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001  # of any library of a store, or of the disk
        raise ValueError(
            f"{url} cannot be used: {first_line(error)}; nothing was started, because the run may "
            "be there. Give the command again when it answers"
        ) from None


def _fetch(folder: RunFolder, store: Store, sizes: Mapping[str, int]) -> None:
    """Fetches the files to a folder beside the run folder, then puts it in its place.

    Those of checkpoints without their mark are left out.
    """
    fresh = folder.path.with_name(f".{folder.path.name}.fetched")
    shutil.rmtree(fresh, ignore_errors=True)
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, disable=None) as bar:
        for path, size in sizes.items():
            checkpoint, _, _ = path.removeprefix("checkpoints/").partition("/")
            if not checkpoint.isdecimal() or f"checkpoints/{checkpoint}/{CHECKPOINT_MARK}" in sizes:
                store.read(path, fresh / path)
            bar.update(size)
    # What a process left that was killed before its run began; `check` found nothing else.
    shutil.rmtree(folder.path, ignore_errors=True)
    fresh.rename(folder.path)
