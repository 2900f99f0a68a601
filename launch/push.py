"""Pushes an export to a model repository of the Hugging Face hub.

    the hub's files -> large files that it lacks, one after another -> one commit -> the hub's files

Readers of the repository see the files from before or the export, never a mixture: the commit comes
last. A repeated push sends only what the hub lacks. Its upload protocol (Xet or LFS) finds
content that it holds; `RECORD` says which files an earlier push has uploaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.exits import Failure
from pipeline.data.models.model_source import HF, HF_HANDLE, HF_LOG_IN
from pipeline.run.record_files import read_json, write_json

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

RECORD = ".export.json"
"""File of an export folder that is not pushed: what the export is of, and what was uploaded."""
REQUEST, _UPLOADED = "request", "uploaded"
"""Keys of `RECORD`: `launch.export.Prepared.request`; hashes of uploaded files by repository."""
_WRITTEN = ("model*.safetensors", "model.safetensors.index.json", "adapter/*", "flax/*")
"""Files that an export writes: the hub's that this export does not have are of an earlier one."""
_DENIED = {401, 403}
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


@dataclass(frozen=True)
class Repository:
    """A model repository that the login may write to, whether it exists or not.

    Attributes:
        name: `USER/NAME`.
        private: whether it becomes private if it does not exist yet.
    """

    name: str
    private: bool

    def __str__(self) -> str:
        """Its handle."""
        return f"{HF}{self.name}"


def find_repository(handle: str, *, private: bool) -> Repository:
    """Checks, before any work, that a repository can be pushed to.

    Args:
        handle: `hf://USER/NAME`.
        private: see `Repository`.

    Raises:
        ValueError: if the name is invalid, or the login is missing, refused, of somebody else or
            for reading only.
        Failure: if the hub cannot be reached.
    """
    match, what = HF_HANDLE.fullmatch(handle), f"--push {handle}"
    if match is None or match[2] is not None:
        raise ValueError(f"{what}: write hf://USER/NAME")
    import httpx
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented

    try:
        validate_repo_id(match[1])
        login = HfApi().whoami()
    except errors.HFValidationError as error:
        raise ValueError(f"{what}: is not a valid name: {error}") from None
    except errors.LocalTokenNotFoundError:
        raise ValueError(f"{what}: there is no login; log in with {HF_LOG_IN}") from None
    except (OSError, httpx.HTTPError) as error:
        if _status(error) in _DENIED:
            again = f"log in again with {HF_LOG_IN}"
            raise ValueError(f"{what}: the hub refuses this login; {again}") from None
        raise Failure(
            f"{what}: the hub cannot be reached: {_reason(error)}; give the same command again "
            "when it can, or leave out --push"
        ) from None
    owners = [login["name"], *(organization["name"] for organization in login.get("orgs", ()))]
    given, _, rest = match[1].partition("/")
    owner = next((name for name in owners if name.lower() == given.lower()), None)
    if owner is None:
        raise ValueError(
            f"{what}: this login may not write to {given}, only to {', '.join(owners)}; name one "
            f"of them, or log in as {given} with {HF_LOG_IN}"
        )
    if login.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(
            f"{what}: the token of this login may only read; make one that may write at "
            f"https://huggingface.co/settings/tokens, and log in with {HF_LOG_IN}"
        )
    return Repository(f"{owner}/{rest}", private)


def read_record(folder: Path) -> Mapping[str, Any]:
    """What `RECORD` holds; empty without one."""
    return read_json(folder / RECORD) or {}


def push(folder: Path, repository: Repository, *, title: str) -> None:
    """Uploads an export and compares the hub's sizes and hashes with those of the files.

    Args:
        folder: of a complete export.
        repository: where to.
        title: of the commit.

    Raises:
        Failure: if the connection breaks, or the hub refuses or reports other content.
    """
    import httpx
    from huggingface_hub import HfApi

    try:
        _push(HfApi(), folder, repository, title=title)
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        remedy = "give the same command again: it continues where this push stopped"
        if _status(error) in _DENIED:
            remedy = f"log in with {HF_LOG_IN}, with a token that may write there, and repeat"
        raise Failure(
            f"{repository}: not pushed: {_reason(error)}; {folder} is complete; {remedy}"
        ) from error


def _push(api: HfApi, folder: Path, repository: Repository, *, title: str) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    name = repository.name
    names = sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and file != folder / RECORD
    )
    files = [CommitOperationAdd(path, str(folder / path)) for path in names]
    api.create_repo(name, private=repository.private, exist_ok=True)
    seen_by = "private" if api.model_info(name).private else "public"
    size = _size(sum(file.upload_info.size for file in files))
    print(f"pushing {len(files)} files, {size}, to {repository} ({seen_by})", flush=True)
    there = _files_of(api, name)
    missing = [file for file in files if _difference(file, folder, there) is not None]
    old = sorted(path for path in there if _is_written(path) and path not in names)
    _upload(api, folder, name, missing, total=files)
    if old:
        print(f"deleting files of an earlier export: {', '.join(old)}", flush=True)
    if missing or old:
        deletions = [CommitOperationDelete(path) for path in old]
        commit = api.create_commit(name, [*missing, *deletions], commit_message=title)
        there = _files_of(api, name, revision=commit.oid)
    for file in files:
        difference = _difference(file, folder, there)
        if difference is not None:
            raise RuntimeError(f"{file.path_in_repo} {difference}")
    print(f"pushed: {api.endpoint}/{name}, sizes and hashes compared", flush=True)


def _upload(
    api: HfApi,
    folder: Path,
    name: str,
    missing: Sequence[CommitOperationAdd],
    *,
    total: Sequence[CommitOperationAdd],
) -> None:
    """Uploads the large ones of the missing files; small ones travel with the commit."""
    record = dict(read_record(folder))
    uploads: dict[str, dict[str, str]] = record.setdefault(_UPLOADED, {})
    uploaded = uploads.setdefault(name, {})
    rest = [file for file in missing if uploaded.get(file.path_in_repo) != _sha256(file)]
    if len(rest) < len(total):
        kept = sum(file.upload_info.size for file in total if file not in rest)
        count = f"{len(total) - len(rest)} of {len(total)} files, {_size(kept)}"
        print(f"{count}, are on the hub already and are not sent again", flush=True)
    for number, file in enumerate(missing, start=1):
        path, sha256 = file.path_in_repo, _sha256(file)
        if file in rest:
            print(f"{number} of {len(missing)}: {path}, {_size(file.upload_info.size)}", flush=True)
        # An uploaded one, too: the hub, which may have dropped it, says whether to send it.
        api.preupload_lfs_files(name, [file])
        if file.path_or_fileobj == b"":  # it was uploaded, and is not needed any more
            uploaded[path] = sha256
            write_json(folder / RECORD, record)


def _files_of(api: HfApi, name: str, *, revision: str | None = None) -> dict[str, RepoFile]:
    from huggingface_hub.hf_api import RepoFile

    entries = api.list_repo_tree(name, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _difference(
    file: CommitOperationAdd, folder: Path, there: Mapping[str, RepoFile]
) -> str | None:
    """How the hub's file differs from the one in the folder; None if it is the same."""
    found, size = there.get(file.path_in_repo), file.upload_info.size
    if found is None:
        return "is not on the hub"
    if found.size != size:
        return f"has {found.size:,} bytes on the hub and {size:,} here"
    if found.lfs is not None:
        same = found.lfs.sha256 == _sha256(file)
    else:
        same = found.blob_id == _git_sha1(folder / file.path_in_repo)
    return None if same else "has other content on the hub"


def _sha256(file: CommitOperationAdd) -> str:
    return file.upload_info.sha256.hex()


def _git_sha1(path: Path) -> str:
    """Hash of a small file, as Git names it."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _is_written(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in _WRITTEN)


def _size(count: int) -> str:
    for unit, size in _UNITS.items():
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _status(error: BaseException) -> int | None:
    """The status of the hub's answer, if it did answer."""
    statuses = (getattr(getattr(one, "response", None), "status_code", None) for one in _of(error))
    return next((status for status in statuses if status is not None), None)


def _reason(error: BaseException) -> str:
    """The innermost message in one line."""
    messages = [" ".join(str(one).split()).rstrip(".") for one in _of(error)]
    return next((message for message in reversed(messages) if message), type(error).__name__)


def _of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__
