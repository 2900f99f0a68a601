"""Pushes an export to a model repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from launch.exits import Failure
from pipeline.data.models.model_source import HF, HF_HANDLE, HF_LOG_IN

_WRITTEN = ["model*.safetensors", "model.safetensors.index.json", "adapter/*", "flax/*"]
"""Files that an export writes: the hub's that this export does not have are of an earlier one."""


def check_push(handle: str) -> str:
    """Checks, before any work, that there is a login; returns the repository as `USER/NAME`.

    Args:
        handle: `hf://USER/NAME`.

    Raises:
        ValueError: if the handle has another form, or there is no login.
        Failure: if the hub cannot be reached, or refuses the login.
    """
    match, what = HF_HANDLE.fullmatch(handle), f"--push {handle}"
    if match is None or match[2] is not None:
        raise ValueError(f"{what}: write hf://USER/NAME")
    import httpx
    from huggingface_hub import HfApi, errors

    try:
        HfApi().whoami()
    except errors.LocalTokenNotFoundError:
        raise ValueError(f"{what}: there is no login; log in with {HF_LOG_IN}") from None
    except (OSError, httpx.HTTPError) as error:
        raise Failure(
            f"{what}: the hub cannot be reached, or refuses the login: {_reason(error)}; log in "
            f"again with {HF_LOG_IN}, or leave out --push"
        ) from None
    return match[1]


def push(folder: Path, name: str, *, private: bool, title: str) -> None:
    """Uploads an export; files that the hub has already are not sent again.

    Args:
        folder: of a complete export.
        name: of the repository, which is made if it does not exist.
        private: whether one that is made is private.
        title: of the commit.

    Raises:
        Failure: if the connection breaks, or the hub refuses.
    """
    import httpx
    from huggingface_hub import HfApi

    api = HfApi()
    print(f"pushing to {HF}{name}", flush=True)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, delete_patterns=_WRITTEN, commit_message=title
        )
    except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        raise Failure(
            f"{HF}{name}: not pushed: {_reason(error)}; {folder} is complete; push it with: "
            f"hf upload {name} {folder} (a token that may write there: {HF_LOG_IN})"
        ) from error
    print(f"pushed: {api.endpoint}/{name}", flush=True)


def _reason(error: BaseException) -> str:
    """The message in one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
