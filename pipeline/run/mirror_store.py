"""The copy of a run folder in a mirror: what is stored there, and how it is read and written.

    MIRROR/NAME/files/SHA256              content of a file, written once
    MIRROR/NAME/manifests/00000012.json   paths, sizes and hashes of one state of the run folder
    MIRROR/NAME/lease.json                the process that writes here

A writer puts the files first, then a manifest that names them, and deletes what only earlier
manifests name last. Wherever it is cut, the newest manifest that is whole names files that are
all there; this needs no atomic replacement of the store.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import MethodType
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

from pipeline.contracts.record_files import (
    DamagedFileError,
    decode_json,
    encode_json,
    write_atomically,
)

STAGED = ".mirror"
"""Folder in a run folder for the state that is being copied."""
_FILES, _MANIFESTS, _LEASE = "files", "manifests", "lease.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_CHECKPOINT = re.compile(r"checkpoints/(\d+)/")
_LEFT_OUT = frozenset({STAGED, "status.json", "wandb", "profile", "superseded"})
"""What no resume and no result needs."""
_UNFINISHED = re.compile(r".*\.(tmp|partial)|.*\.orbax-checkpoint-tmp.*")
_LOCAL = ("", "file", "local")
"""Schemes of paths on this host."""
_GOOGLE = ("gs", "gcs")
FIRST_ATTEMPTS = 3
"""How often gs:// tries a request before a start gives up a store that is gone: in 3 to 5 s."""
_FIRST_LOOKUP_S = 5.0
"""Seconds in which it looks for the kind of the bucket before that; 60 by default."""

# It prints a traceback of each failure, which is raised, too.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Stored:
    """Content of a file.

    Attributes:
        bytes: its size.
        sha256: its hash; empty if it is unknown.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """One state of a run folder.

    Attributes:
        number: manifests of a run are counted.
        files: by path relative to the run folder.
        host: that wrote it.
        time: when the state was taken, in UTC.
        checkpoint: step of the newest checkpoint; None: there is none.
        programs: compiled programs, by name in the cache.
        machine: for which the programs were compiled.
    """

    number: int
    files: Mapping[str, Stored]
    host: str
    time: str
    checkpoint: int | None
    programs: Mapping[str, Stored] = field(default_factory=dict)
    machine: str = ""

    @property
    def sha256s(self) -> set[str]:
        """The hashes of all contents."""
        return {stored.sha256 for stored in (*self.files.values(), *self.programs.values())}

    @property
    def origin(self) -> str:
        """Host, time and newest checkpoint in words."""
        saved = "no checkpoint" if self.checkpoint is None else f"checkpoint {self.checkpoint}"
        return f"of host {self.host} at {self.time}, {saved}"

    @staticmethod
    def parse(text: bytes, name: str) -> Manifest:
        """Reads a manifest.

        Raises:
            DamagedFileError: if it is incomplete, or names a path outside of the run folder.
        """
        value = decode_json(text, name)
        try:
            files, programs = ({k: Stored(**v) for k, v in value.pop(key).items()} for key in _KEYS)
            found = Manifest(**value, files=files, programs=programs)
        except (TypeError, AttributeError, LookupError):
            raise DamagedFileError(f"{name} is no manifest of a mirror") from None
        unsafe = [path for path in files if not _is_inside(path)]
        unsafe += [program for program in programs if not _NAME.fullmatch(program)]
        unsafe += [sha256 for sha256 in found.sha256s if not _SHA256.fullmatch(sha256)]
        if unsafe:
            raise DamagedFileError(f"{name} names {unsafe[0]!r}, outside of the run folder")
        return found


_KEYS = ("files", "programs")


def _is_inside(path: str) -> bool:
    pure = PurePosixPath(path)
    return (
        bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and "\0" not in path
    )


def is_local(url: str) -> bool:
    """Whether a URL names a folder of this host."""
    return urlsplit(url).scheme in _LOCAL


def is_mirrored(path: str) -> bool:
    """Whether a mirror has a file or folder of a run folder, by its relative path."""
    parts = path.split("/")
    return parts[0] not in _LEFT_OUT and not any(map(_UNFINISHED.fullmatch, parts))


def newest_checkpoint(paths: Iterable[str]) -> int | None:
    """The step of the newest checkpoint among the files of a run folder."""
    found = (_CHECKPOINT.match(path) for path in paths)
    return max((int(match[1]) for match in found if match), default=None)


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


class Store:
    """The copy of one run in a mirror.

    Its methods raise what the library of the URL's protocol raises: any `Exception`.

    Args:
        url: MIRROR/NAME.
        asks_first: whether it only asks, at the start of a run, whether the store answers: gs://
            then gives up a store that is gone after `FIRST_ATTEMPTS` attempts.

    Raises:
        ValueError: as `check_protocol`.
    """

    def __init__(self, url: str, *, asks_first: bool = False) -> None:
        self.url = url
        check_protocol(url)
        # Not for other protocols: they have no folders, or do not know the option.
        options: dict[str, Any] = {"auto_mkdir": True} if is_local(url) else {}
        limited = asks_first and urlsplit(url).scheme in _GOOGLE
        if limited:
            options = {"skip_instance_cache": True, "retry_timeout": _FIRST_LOOKUP_S}
        fs, root = fsspec.url_to_fs(url, **options)
        if limited:
            _limit_attempts(fs)
        self._fs: AbstractFileSystem = fs
        self._root = str(root).rstrip("/")

    def check_folder(self, run: Path) -> None:
        """Checks the folder of a mirror on this host: an unmounted disk must not be written.

        Args:
            run: the run folder.

        Raises:
            ValueError: if there is no such folder, or it is or contains the run folder, or is in
                it.
        """
        if not is_local(self.url):
            return
        here, run = Path(self._root).resolve(), run.resolve()
        if not here.parent.is_dir():
            raise ValueError(f"run.mirror: there is no folder {here.parent}; create or mount it")
        if here.is_relative_to(run) or run.is_relative_to(here):
            raise ValueError(
                f"run.mirror: the copy {here} and the run folder {run} would contain each other; "
                "name a folder on another disk"
            )

    # --- manifests

    def newest(self) -> Manifest | None:
        """The newest manifest that is whole; None if there is none.

        Raises:
            DamagedFileError: if there are manifests, and none of them is whole.
        """
        error = None
        for name in sorted(self._names(_MANIFESTS), reverse=True):
            try:
                text = self._fs.cat_file(self._path(_MANIFESTS, name))
                return Manifest.parse(text, f"{self.url}/{_MANIFESTS}/{name}")
            except DamagedFileError as damage:
                error = damage
        if error is not None:
            raise DamagedFileError(
                f"{error}; restore it from a copy, or delete {self.url} to begin a new mirror"
            )
        return None

    def publish(self, manifest: Manifest) -> None:
        """Writes a manifest, whose files are stored."""
        self._write(self._path(_MANIFESTS, _name(manifest)), encode_json(asdict(manifest)))

    def prune(self, manifest: Manifest) -> dict[str, int]:
        """Deletes earlier manifests, then the files that this one does not name.

        Returns:
            The sizes of the files that are left, by hash.
        """
        for earlier in self._names(_MANIFESTS):
            if earlier < _name(manifest):
                self._delete(self._path(_MANIFESTS, earlier))
        needed, sizes = manifest.sha256s, self.sizes()
        for sha256 in sizes.keys() - needed:
            self._delete(self._path(_FILES, sha256))
        return {sha256: size for sha256, size in sizes.items() if sha256 in needed}

    # --- files

    def sizes(self) -> dict[str, int]:
        """The sizes of the stored files, by hash."""
        return self._names(_FILES)

    def put(self, file: Path, sha256: str) -> None:
        """Stores the content of a file."""
        self._fs.put_file(str(file), self._path(_FILES, sha256))

    def get(self, path: str, stored: Stored, file: Path) -> None:
        """Fetches the content of a file, unless it is there.

        Args:
            path: of the file in the run folder.
            stored: its content, as a manifest has it.
            file: where it goes.

        Raises:
            DamagedFileError: if the content has another hash.
        """
        sha256 = stored.sha256
        if sha256 and file.is_file() and sha256_of(file) == sha256:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        name = self._path(_FILES, sha256) if sha256 else self._path(path)
        with self._fs.open(name, "rb") as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
        if sha256 and sha256_of(partial) != sha256:
            partial.unlink()
            raise DamagedFileError(f"{name} in {self.url}, which is {path} of the run, is damaged")
        partial.replace(file)

    def read_consistently(self, manifest: Manifest, read: Callable[[Manifest], None]) -> Manifest:
        """Reads the files of a manifest; of a newer one, if a writer deletes them meanwhile.

        Returns:
            The manifest that was read.

        Raises:
            FileNotFoundError: if a file is missing that the newest manifest names.
        """
        while True:
            try:
                read(manifest)
            except FileNotFoundError:
                newer = self.newest()
                if newer is None or newer.number == manifest.number:
                    raise
                manifest = newer
            else:
                return manifest

    def plain_run(self) -> Manifest | None:
        """The files of a run folder, where the URL names one; without hashes."""
        try:
            found = self._fs.find(self._root, detail=True)
        except _NOT_THERE:
            return None
        sizes = {name[len(self._root) + 1 :]: entry["size"] for name, entry in found.items()}
        if "config.json" not in sizes:
            return None
        files = {path: Stored(size, "") for path, size in sizes.items() if is_mirrored(path)}
        return Manifest(
            0, files, host="unknown", time="unknown time", checkpoint=newest_checkpoint(files)
        )

    # --- lease

    def read_lease(self) -> dict[str, Any] | None:
        """The lease; None if there is none, or its writer was cut."""
        self._fs.invalidate_cache()
        with suppress(*_NOT_THERE, DamagedFileError):
            return decode_json(self._fs.cat_file(self._path(_LEASE)), _LEASE)
        return None

    def write_lease(self, lease: Mapping[str, Any]) -> None:
        """Replaces the lease."""
        self._write(self._path(_LEASE), encode_json(lease))

    def delete_lease(self) -> None:
        """Deletes the lease."""
        self._delete(self._path(_LEASE))

    # --- the store

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _names(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files in a folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(folder), detail=True)
        except _NOT_THERE:
            return {}
        return {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0)
            for entry in found
            if entry["type"] == "file"
        }

    def _write(self, path: str, text: bytes) -> None:
        if is_local(self.url):  # object stores replace a file atomically
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), text)
        else:
            self._fs.pipe_file(path, text)

    def _delete(self, path: str) -> None:
        with suppress(*_NOT_THERE):
            self._fs.rm_file(path)


def _limit_attempts(fs: Any) -> None:
    """Makes a filesystem of gcsfs try a request `FIRST_ATTEMPTS` times, by its own rules.

    It has no setting for this: the decorator of the method has the number, 6 in 31 to 36 s.
    """
    from gcsfs.retry import retry_request

    request = retry_request(retries=FIRST_ATTEMPTS)(type(fs)._request.__wrapped__)  # noqa: SLF001
    fs._request = MethodType(request, fs)  # noqa: SLF001


def _name(manifest: Manifest) -> str:
    return f"{manifest.number:08d}.json"


def sha256_of(file: Path) -> str:
    """The hash of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
