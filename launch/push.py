"""Pushes an export to a model repository of the Hugging Face hub.

In one commit, which `HfApi.upload_folder` does not promise: readers of the repository see the files
from before or the export, never a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from launch.exits import Failure
from pipeline.data.models.model_source import HF, HF_HANDLE, HF_LOG_IN

_WRITTEN = ("model*.safetensors", "model.safetensors.index.json", "adapter/*", "flax/*")
"""Files that an export writes: the hub's that this export does not have are of an earlier one."""
_DENIED = {401, 403}


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
        ValueError: if the name is invalid, or the login is missing, refused or of somebody else.
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
        if _is_denied(error):
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
    return Repository(f"{owner}/{rest}", private)


def push(folder: Path, repository: Repository, *, title: str) -> None:
    """Uploads an export; files that the hub has already are not sent again.

    Args:
        folder: of a complete export.
        repository: where to.
        title: of the commit.

    Raises:
        Failure: if the connection breaks, or the hub refuses.
    """
    import httpx
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, name = HfApi(), repository.name
    files = (file for file in folder.rglob("*") if file.is_file())
    paths = sorted(file.relative_to(folder).as_posix() for file in files)
    try:
        api.create_repo(name, private=repository.private, exist_ok=True)
        seen_by = "private" if api.model_info(name).private else "public"
        print(f"pushing {len(paths)} files to {repository} ({seen_by})", flush=True)
        old = [
            path
            for path in api.list_repo_files(name)
            if path not in paths and any(fnmatchcase(path, pattern) for pattern in _WRITTEN)
        ]
        if old:
            print(f"deleting files of an earlier export: {', '.join(sorted(old))}", flush=True)
        added = [CommitOperationAdd(path, str(folder / path)) for path in paths]
        deleted = [CommitOperationDelete(path) for path in old]
        api.create_commit(name, [*added, *deleted], commit_message=title)
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        remedy = f"push it with: hf upload {name} {folder}"
        if _is_denied(error):
            remedy = f"log in with {HF_LOG_IN}, with a token that may write there, and {remedy}"
        raise Failure(
            f"{repository}: not pushed: {_reason(error)}; {folder} is complete; {remedy}"
        ) from error
    print(f"pushed: {api.endpoint}/{name}", flush=True)


def _is_denied(error: BaseException) -> bool:
    """Whether the hub's answer refuses the login."""
    return getattr(getattr(error, "response", None), "status_code", None) in _DENIED


def _reason(error: BaseException) -> str:
    """The message in one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
