"""The mirror of a run: a copy of its folder elsewhere, which a host without the folder fetches.

MIRROR/NAME has the paths of the run folder. The journal says of a checkpoint what it needs, so a
copy writes the record files before the checkpoints, and each checkpoint's hashes last: wherever a
copy ends, the checkpoints with hashes are complete and have their records.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem
from tqdm import tqdm

from configs.base import absolute_url, mirror_problem
from configs.schema import Config
from pipeline.contracts.checkpoint_files import HASHES
from pipeline.run.run_folder import RunFolder
from pipeline.run.threads import LogEvent, first_line, from_threads

FINISH_S = 60.0
"""Time limit in seconds for the last copy, after the devices are released."""
FETCHED = "fetched"
"""Journal event: the run came from elsewhere."""
_SETTINGS = ("config.json", "journal.jsonl")
"""Files with the settings of a run."""
_RECORDS = ("config.json", "summary.json", "plan.json", "journal.jsonl")
"""Files that refer to others, in the order in which they are read; they are copied in reverse."""
_LEFT_OUT = frozenset({"status.json", "wandb", "profile", "superseded"})
"""What no resume and no result needs."""
_UNFINISHED = re.compile(r".*\.(tmp|partial)|.*\.orbax-checkpoint-tmp.*")
_CHECKPOINT = re.compile(r"checkpoints/(\d+)/.")
_LOCAL = ("", "file", "local")
"""Schemes of paths on this host."""

Stamp = tuple[int, float]
"""Size of a file, and time of its change in seconds since 1970."""

# It prints a traceback of each failure, which is raised, too.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


class _ChangedError(Exception):
    """A file was deleted while the run folder was copied."""


class Store:
    """A folder at a URL. Its methods raise what the library of the protocol raises.

    Args:
        url: of the folder, which need not exist.

    Raises:
        ValueError: if the protocol is unknown or its library is not installed.
    """

    def __init__(self, url: str) -> None:
        check_protocol(url)
        self.url = url
        self._is_local = is_local(url)
        options: dict[str, Any] = {"auto_mkdir": True} if self._is_local else {}
        fs, root = fsspec.url_to_fs(url, **options)
        self._fs: AbstractFileSystem = fs
        self._root = str(root).rstrip("/")

    def sizes(self) -> dict[str, int]:
        """The sizes of the files that are not temporary, by path.

        Raises:
            ValueError: if a path leads outside of the folder.
        """
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        sizes = {
            name.removeprefix(f"{self._root}/"): int(entry["size"] or 0)
            for name, entry in found.items()
            if name.startswith(f"{self._root}/") and not name.endswith("/")
        }
        for path in sizes:
            if ".." in PurePosixPath(path).parts:
                raise ValueError(f"{self.url} contains {path!r}, which is outside of a run folder")
        return {path: size for path, size in sizes.items() if _is_mirrored(path)}

    def changed_s(self, path: str) -> float:
        """When a file was written, in seconds since 1970; 0 if the store does not know."""
        with suppress(NotImplementedError, KeyError):
            return float(self._fs.modified(f"{self._root}/{path}").timestamp())
        return 0.0

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
        """Fetches a file, with the time when it was written."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(f"{self._root}/{path}", str(file))
        if changed_s := self.changed_s(path):
            os.utime(file, (changed_s, changed_s))

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes files, and the local folders that become empty."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{path}")
            if self._is_local:
                with suppress(OSError):
                    for parent in PurePosixPath(path).parents:
                        Path(self._root, parent).rmdir()

    def check_writable(self) -> None:
        """Writes a file and deletes it."""
        self.write(".writable", b"-")
        self.delete([".writable"])


class Copier:
    """Copies what is new in a run folder.

    Args:
        folder: the run folder.
        url: MIRROR/NAME.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._store: Store | None = None
        self._copied: dict[str, Stamp] = {}

    def copy(self) -> None:
        """Copies new and changed files, then deletes what the run folder no longer has.

        Raises:
            Exception: what the store raises; the next call continues.
        """
        _check_folder(self._url, self._folder)
        if self._store is None:
            store = Store(self._url)
            self._copied = {
                path: (size, store.changed_s(path)) for path, size in store.sizes().items()
            }
            self._store = store
        while True:
            with suppress(_ChangedError):
                self._copy(self._store)
                return

    def _copy(self, store: Store) -> None:
        found = _scan(self._folder)
        whole = _checkpoints(found)
        new = {path for path, stamp in found.items() if not self._has(path, stamp)}
        checkpoints = {path for path in new if _step(path) is not None}
        records = [path for path in (*_RECORDS, *sorted(new)) if path in new and "/" not in path]
        # What is read first refers to what is read later.
        content = {path: self._read(path) for path in dict.fromkeys(records)}
        # An old summary.json would contradict the journal.
        self._delete(
            store, (path for path in self._copied.keys() - found.keys() if "/" not in path)
        )
        for path in sorted(new - checkpoints - content.keys()):
            self._write(store, path, found[path], self._folder / path)
        for path in reversed(content):
            self._write(store, path, found[path], content[path])
        for path in sorted(checkpoints, key=_hashes_last):
            if _step(path) in whole:
                self._write(store, path, found[path], self._folder / path)
        kept = {_step(path) for path in found}
        gone = (
            path
            for path in sorted(self._copied.keys() - found.keys(), key=_hashes_last, reverse=True)
            if (step := _step(path)) is None or (whole and step not in kept)
        )
        self._delete(store, gone)

    def _has(self, path: str, stamp: Stamp) -> bool:
        size, changed_s = self._copied.get(path, (-1, 0.0))
        return size == stamp[0] and changed_s >= stamp[1]

    def _read(self, path: str) -> bytes:
        try:
            return (self._folder / path).read_bytes()
        except FileNotFoundError:
            raise _ChangedError from None

    def _write(self, store: Store, path: str, stamp: Stamp, content: bytes | Path) -> None:
        try:
            store.write(path, content)
        except FileNotFoundError:
            if isinstance(content, bytes) or content.exists():
                raise  # of the store
            raise _ChangedError from None
        self._copied[path] = stamp

    def _delete(self, store: Store, paths: Iterable[str]) -> None:
        for path in list(paths):
            store.delete([path])
            del self._copied[path]


class Mirror:
    """Copies a run folder in a thread; this never blocks the run, nor fails it.

    Args:
        url: MIRROR/NAME; None: there is no mirror, and every call does nothing.
        now: reads a clock, in seconds.
    """

    def __init__(self, url: str | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self._now = now
        self._asked, self._ended = threading.Event(), threading.Event()
        self._finishes = self._has_failed = False
        self._copied_s: float | None = None
        self._log_event: LogEvent

    @staticmethod
    def of(config: Config) -> Mirror:
        """The mirror of a configuration."""
        return Mirror(mirror_url(config))

    def start(self, folder: Path, *, log_event: LogEvent) -> None:
        """Starts the thread, which copies at once what is there.

        Args:
            folder: the run folder.
            log_event: writes an event to journal and console; called in the thread of the caller's
                event loop.
        """
        if self.url is None:
            return
        self._log_event, self._copied_s = from_threads(log_event), self._now()
        copier = Copier(folder, self.url)
        threading.Thread(target=self._serve, args=[copier], name="mirror", daemon=True).start()
        self.request()

    def request(self) -> None:
        """Asks for a copy; requests during a copy become one."""
        self._asked.set()

    def metrics(self) -> dict[str, float]:
        """How far the mirror is behind; empty without one."""
        if self._copied_s is None:
            return {}
        return {"mirror/behind_s": self._now() - self._copied_s}

    async def finish(self) -> None:
        """Waits up to `FINISH_S` for a last copy; logs if it is not complete."""
        if self._copied_s is None:
            return
        self._finishes = True
        self.request()
        in_time = await asyncio.to_thread(self._ended.wait, FINISH_S)
        if not in_time or self._has_failed:
            limit = "" if in_time else f" within {FINISH_S:g} s"
            behind_s = self._now() - self._copied_s
            self._say(
                f"the end of the run could not be copied{limit}; the mirror is of {behind_s:.0f} s "
                "ago; the same command continues the copy from this host",
                behind_s=behind_s,
            )
        await asyncio.sleep(0)  # for the thread's messages, and this one

    def _say(self, text: str, **facts: Any) -> None:
        self._log_event("mirror", f"mirror {self.url}: {text}", **facts)

    def _serve(self, copier: Copier) -> None:
        """Copies at each request, until `finish`; the function of the thread."""
        finishes = False
        while not finishes:
            self._asked.wait()
            self._asked.clear()
            finishes, began_s = self._finishes, self._now()
            try:
                copier.copy()
            except Exception as error:  # noqa: BLE001  # of any library of a store
                if not self._has_failed:
                    self._has_failed = True
                    text = (
                        f"cannot be written ({first_line(error)}); the next checkpoint tries again"
                    )
                    self._say(text, failed=first_line(error))
            else:
                self._copied_s = began_s
                if self._has_failed:
                    self._has_failed = False
                    self._say("works again, and has the run", works=True)
        self._ended.set()


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


def _step(path: str) -> int | None:
    """The step of the checkpoint that a file belongs to; None: it belongs to none."""
    match = _CHECKPOINT.match(path)
    return None if match is None else int(match[1])


def _checkpoints(paths: Collection[str]) -> set[int]:
    """The steps of the complete checkpoints, which have the hashes of their files."""
    steps = {_step(path) for path in paths}
    return {step for step in steps if step is not None and f"checkpoints/{step}/{HASHES}" in paths}


def _hashes_last(path: str) -> tuple[int, bool, str]:
    return _step(path) or 0, path.endswith(f"/{HASHES}"), path


# --- the start


def mirror_url(config: Config) -> str | None:
    """MIRROR/NAME of a configuration; None without a mirror."""
    return None if config.run.mirror is None else f"{config.run.mirror}/{config.run.name}"


def is_local(url: str) -> bool:
    """Whether a URL names a folder of this host."""
    return urlsplit(url).scheme in _LOCAL


def _local_path(url: str) -> Path:
    return Path(url.partition("://")[2] or url)


def check_protocol(url: str) -> None:
    """Checks that the library of a URL's protocol is installed.

    Raises:
        ValueError: if it is not, or the protocol is unknown.
    """
    protocol = "file" if is_local(url) else url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ValueError(
            f"{protocol}:// needs a library that is not installed ({error}); `make "
            "install-mirror` installs those of s3:// and gs://"
        ) from None
    except ValueError:
        raise ValueError(f"{protocol}:// is not supported by fsspec") from None


def check_mirror(mirror: str, folder: Path) -> None:
    """Checks `run.mirror` without keys: a submitted job may have others.

    Args:
        mirror: its value.
        folder: the run folder.

    Raises:
        ValueError: if its protocol has no library here, or its folder cannot have the copy.
    """
    check_protocol(mirror)
    _check_folder(f"{mirror}/{folder.name}", folder)


def _check_folder(url: str, run: Path) -> None:
    """Checks the folder of a mirror on this host: an unmounted disk must not be written.

    Args:
        url: MIRROR/NAME.
        run: the run folder.

    Raises:
        ValueError: if MIRROR does not exist, or copy and run folder contain each other.
    """
    if not is_local(url):
        return
    here, run = _local_path(url).resolve(), run.resolve()
    if not here.parent.is_dir():
        raise ValueError(f"run.mirror: there is no folder {here.parent}; create or mount it")
    if here.is_relative_to(run) or run.is_relative_to(here):
        raise ValueError(
            f"run.mirror: the copy {here} and the run folder {run} would contain each other; "
            "name a folder on another disk"
        )


def adopted(source: str | None) -> str | None:
    """What `--adopt` names, as `fetch_run` takes it.

    Raises:
        ValueError: if it is not a path or a URL without a password.
    """
    if source is None:
        return None
    problem = mirror_problem(source)
    if problem is not None:
        raise ValueError(f"--adopt: {problem}")
    return absolute_url(source)


def check_adopt(config: Config, source: str | None, *, accept: Collection[str]) -> None:
    """Checks what `--adopt` names without fetching it, and without keys: a job may have others.

    Args:
        config: of the run.
        source: what `--adopt` names.
        accept: see `RunFolder.check`.

    Raises:
        ValueError: if it cannot be adopted.
    """
    url, folder = adopted(source), RunFolder.of(config)
    if url is None:
        return
    check_protocol(url)
    if not (is_local(url) or folder.holds_run):
        return
    with _failures_of(url), TemporaryDirectory() as fresh:
        store, sizes = _found_to_adopt(folder, url)
        if sizes:
            _fetch_settings(config, store, sizes, Path(fresh), accept)


def fetch_run(
    config: Config,
    *,
    adopt: str | None,
    accept: Collection[str] = (),
    say: Callable[[str], None],
) -> None:
    """Fetches the run if this host has none.

    Args:
        config: of the run.
        adopt: a run folder, or the mirror of a run, that is read instead of the mirror.
        accept: see `RunFolder.check`.
        say: shows a line.

    Raises:
        ValueError: if the run cannot be fetched or has other settings, or if there is none and the
            mirror cannot be written.
    """
    folder, url = RunFolder.of(config), mirror_url(config)
    with _failures_of(adopt or url):
        if adopt is not None:
            store, sizes = _found_to_adopt(folder, adopt)
        elif url is not None and not folder.holds_run:
            _check_folder(url, folder.path)
            store = Store(url)
            sizes = _run_in(store)
            if not sizes:
                store.check_writable()
        else:
            return
        if sizes:
            _fetch(config, folder, store, sizes, accept, say)


@contextmanager
def _failures_of(place: str | None) -> Iterator[None]:
    """Names the place in errors of any library of a store, or of the disk."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001
        why = first_line(error)
        if isinstance(error, FileNotFoundError):
            why += ": it does not exist, or the keys in the environment do not open it"
        raise ValueError(
            f"{place} cannot be used: {why}; nothing was started, because the run may be there. "
            "Give the command again when it answers"
        ) from None


def _run_in(store: Store) -> dict[str, int]:
    """The files of a run with their sizes, without incomplete checkpoints; empty: there is none."""
    sizes = store.sizes()
    if "config.json" not in sizes:
        return {}
    whole = _checkpoints(sizes)
    return {
        path: size for path, size in sizes.items() if (step := _step(path)) is None or step in whole
    }


def _found_to_adopt(folder: RunFolder, source: str) -> tuple[Store, dict[str, int]]:
    """The run that `--adopt` names; without files if this host has fetched it."""
    if folder.holds_run:
        if any(entry["source"] == source for entry in folder.events(FETCHED)):
            return Store(source), {}
        raise ValueError(
            f"--adopt: {folder.path} holds a run; remove --adopt to continue it, or choose "
            "another run.name"
        )
    if is_local(source) and RunFolder(_local_path(source)).is_locked:
        raise ValueError(f"--adopt: another process is using {source}")
    store = Store(source)
    sizes = _run_in(store)
    if not sizes:
        raise ValueError(f"--adopt: {source} is neither a run folder nor the mirror of a run")
    return store, sizes


def _fetch(
    config: Config,
    folder: RunFolder,
    store: Store,
    sizes: Mapping[str, int],
    accept: Collection[str],
    say: Callable[[str], None],
) -> None:
    """Fetches all files to a folder beside the run folder, then puts it in its place.

    The files with the settings come first: a run with other ones is not fetched.
    """
    folder.check(config)
    total, last = sum(sizes.values()), max(_checkpoints(sizes), default=None)
    saved = "no checkpoint" if last is None else f"checkpoint {last}"
    say(f"fetching {len(sizes)} files, {total / 2**20:.1f} MiB, from {store.url} ({saved})")
    fresh = folder.path.with_name(f".{folder.path.name}.fetched")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        _fetch_settings(config, store, sizes, fresh, accept)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
            for path, size in sizes.items():
                if path not in _SETTINGS:
                    store.read(path, fresh / path)
                bar.update(size)
        RunFolder(fresh).journal(FETCHED, source=store.url, checkpoint=last)
        # What a process left that was killed before its run began; `check` found nothing else.
        shutil.rmtree(folder.path, ignore_errors=True)
        fresh.rename(folder.path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _fetch_settings(
    config: Config, store: Store, paths: Collection[str], fresh: Path, accept: Collection[str]
) -> None:
    """Fetches the files with the settings of the run, and compares them with the request's."""
    for path in _SETTINGS:
        if path in paths:
            store.read(path, fresh / path)
    RunFolder(fresh).check_settings(config, accept=accept, place=store.url)
