"""The mirror of a run: a copy of its folder elsewhere, which a host without the folder fetches.

MIRROR/NAME has the files of the run folder as they were at one moment. A copy writes what the
records refer to, then the records, then the checkpoints, Orbax's mark of each last: wherever it is
cut, a checkpoint with this mark is complete and has its records.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from configs.schema import Config
from pipeline.run.checkpoint_files import CHECKPOINT_MARK
from pipeline.run.run_folder import RunFolder
from pipeline.run.threads import LogEvent, first_line, from_threads

FINISH_S = 60.0
"""Time limit in seconds for the last copy, after the devices are released."""
_LEFT_OUT = re.compile(
    r"(status\.json|wandb|profile)(/.*)?"  # what no resume and no result needs
    r"|(.*/)?[^/]*\.(tmp|partial|replaced|orbax-checkpoint-tmp[^/]*)(/.*)?"  # incomplete
)
_FINAL = re.compile(r"rollouts/(step|sft)_.*|checkpoints/\d+/.*")
"""What is never replaced by another file of the same size."""

Stamp = tuple[int, float | None]
"""Size of a file, and time of its change in seconds since 1970; None: unknown."""

# It prints a traceback of each failure, which is raised, too.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


class Snapshot:
    """The files of a run folder at one moment, by path; the content of its records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stamps: dict[str, Stamp] = {}
        for parent, _, names in os.walk(folder):
            for file in (Path(parent, name) for name in names):
                path = file.relative_to(folder).as_posix()
                if not _LEFT_OUT.fullmatch(path):
                    with suppress(FileNotFoundError):  # retention deletes checkpoints
                        self.stamps[path] = (file.stat().st_size, file.stat().st_mtime)
        records = [path for path in self.stamps if "/" not in path]
        self.records = {path: (folder / path).read_bytes() for path in records}


class Copier:
    """Copies what is new in a run folder to MIRROR/NAME; raises what the store raises.

    Of the files that an earlier process has copied only those are new that may have been replaced.
    """

    def __init__(self, url: str) -> None:
        self._store = open_store(url)
        self._copied: dict[str, Stamp] = {
            path: (size, None) for path, size in sizes(self._store).items()
        }

    def copy(self, new: Snapshot) -> None:
        """Copies new and changed files, then deletes what the run folder no longer has.

        Retention may delete a checkpoint meanwhile: what is left is for the next call.
        """
        for path in sorted(new.stamps, key=_place):
            stamp = new.stamps[path]
            same = {stamp, (stamp[0], None)} if _FINAL.fullmatch(path) else {stamp}
            if self._copied.get(path) not in same:
                content = new.records.get(path, new.folder / path)
                if isinstance(content, Path) and not content.exists():
                    return
                _write(self._store, path, content)
            self._copied[path] = stamp
        for path in sorted(self._copied.keys() - new.stamps.keys(), key=_place, reverse=True):
            self._store.rm_file(path)
            del self._copied[path]


class Mirror:
    """Copies a run folder to MIRROR/NAME in a thread; this never blocks the run, nor fails it.

    Without a URL there is no mirror, and every call does nothing.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._finishes = False
        self._snapshot: Snapshot
        self._log_event: LogEvent

    def start(self, folder: Path, *, log_event: LogEvent) -> None:
        """Starts the thread, which copies at once what is in the run folder.

        `log_event` is called in the thread of the caller's event loop.
        """
        if self.url is None:
            return
        self._snapshot, self._log_event = Snapshot(folder), from_threads(log_event)
        self._asked.set()
        self._thread = threading.Thread(target=self._serve, name="mirror", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Asks for a copy of what is there now, in place of requests that wait."""
        if self._thread is not None:
            self._snapshot = Snapshot(self._snapshot.folder)
            self._asked.set()

    async def finish(self) -> None:
        """Waits up to `FINISH_S` for a last copy; logs if it is not complete."""
        if self._thread is None:
            return
        self.request()
        self._finishes = True
        self._asked.set()
        await asyncio.to_thread(self._thread.join, FINISH_S)
        if self._thread.is_alive():
            self._say_end_is_missing(f"not in {FINISH_S:.0f} s")
        await asyncio.sleep(0)  # for the thread's messages, and this one

    def _say_end_is_missing(self, why: str) -> None:
        self._say(
            f"the end of the run is not copied ({why}); copy {self._snapshot.folder} there by "
            "hand, unless the run continues on this host"
        )

    def _say(self, text: str) -> None:
        self._log_event("mirror", f"mirror {self.url}: {text}", what=text)

    def _serve(self) -> None:
        """Copies at each request, until `finish`; the function of the thread."""
        copier, finishes = None, False
        while not finishes:
            self._asked.wait()
            self._asked.clear()
            finishes = self._finishes
            try:
                copier = copier or Copier(str(self.url))
                copier.copy(self._snapshot)
            except Exception as error:  # noqa: BLE001  # of any library of a store
                why = first_line(error)
                if finishes:
                    self._say_end_is_missing(why)
                else:
                    self._say(f"cannot be written ({why}); the next copy tries again")


def _place(path: str) -> tuple[int, int, bool, str]:
    """Where in a copy a file is: the newest checkpoint first of all, the best adapter last."""
    top, _, rest = path.partition("/")
    step = rest.partition("/")[0] if top == "checkpoints" else ""
    order = 2 if top == "checkpoints" else 0 if rest else 1
    return order, -int(step) if step.isdecimal() else 0, path.endswith(CHECKPOINT_MARK), path


# --- the store


def open_store(url: str) -> DirFileSystem:
    """The folder at a URL, which need not exist; paths are relative to it."""
    options = {"auto_mkdir": True} if _is_local(url) else {}
    fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    return DirFileSystem(root, fs)


def sizes(store: DirFileSystem) -> dict[str, int]:
    """The sizes of the files in a store, by path."""
    try:
        found = store.find("", detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {
        path: int(entry["size"] or 0) for path, entry in found.items() if entry["type"] == "file"
    }


def _write(store: DirFileSystem, path: str, content: bytes | Path) -> None:
    """Replaces a file, which is never seen half written."""
    is_local = isinstance(store.fs, LocalFileSystem)
    written = f"{path}.partial" if is_local else path
    if isinstance(content, bytes):
        store.pipe_file(written, content)
    else:
        store.put_file(str(content), written)
    if is_local:
        store.mv(written, path)


def _is_local(url: str) -> bool:
    return urlsplit(url).scheme in {"", "file", "local"}


# --- the start


def mirror_url(config: Config) -> str | None:
    """MIRROR/NAME of a configuration; None without a mirror."""
    return None if config.run.mirror is None else f"{config.run.mirror}/{config.run.name}"


def check_mirror(mirror: str | None, folder: Path) -> None:
    """Checks `run.mirror` of a run folder without keys: a submitted job may have others.

    Raises:
        ValueError: if its protocol has no library here, or it is a folder of this host that does
            not exist (an unmounted disk), or in which copy and run folder would contain each other.
    """
    if mirror is None:
        return
    if not _is_local(mirror):
        try:
            fsspec.get_filesystem_class(mirror.partition("://")[0])
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"run.mirror = {mirror}: {error}; `make install-mirror` installs the libraries of "
                "s3:// and gs://"
            ) from None
        return
    here = Path(mirror.partition("://")[2] or mirror).resolve()
    if not here.is_dir():
        raise ValueError(f"run.mirror: there is no folder {here}; create or mount it")
    copy, folder = (here / folder.name).resolve(), folder.resolve()
    if copy.is_relative_to(folder) or folder.is_relative_to(copy):
        raise ValueError(
            f"run.mirror: the copy {copy} and the run folder {folder} would contain each other; "
            "name a folder on another disk"
        )


def fetch_run(config: Config, *, say: Callable[[str], None]) -> None:
    """Fetches the run from its mirror if this host has none; `say` shows a line.

    Raises:
        ValueError: if the mirror cannot be read.
    """
    folder, url = RunFolder.of(config), mirror_url(config)
    if url is None or folder.holds_run:
        return
    check_mirror(config.run.mirror, folder.path)
    try:
        store = open_store(url)
        found = sizes(store)
        if "config.json" in found:
            folder.check(config)  # refuses a folder with other content
            say(f"fetching the run from {url}")
            _fetch(store, found, folder.path)
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001  # of any library of a store, or of the disk
        raise ValueError(
            f"{url} cannot be used: {first_line(error)}; nothing was started: the run may be there"
        ) from None


def _fetch(store: DirFileSystem, found: dict[str, int], folder: Path) -> None:
    """Fetches files to a folder beside the run folder, then puts it in its place."""
    fresh = folder.with_name(f".{folder.name}.fetched")
    shutil.rmtree(fresh, ignore_errors=True)
    with tqdm(total=sum(found.values()), unit="B", unit_scale=True, disable=None) as bar:
        for path, size in found.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            store.get_file(path, str(fresh / path))
            bar.update(size)
    for checkpoint in fresh.glob("checkpoints/[0-9]*"):
        if not (checkpoint / CHECKPOINT_MARK).exists():
            shutil.rmtree(checkpoint)
    # What a process left that was killed before its run began; `check` found nothing else.
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
