"""Finds the files of a model: a folder, or a hub handle whose files are cached. No JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from configs.base import nearest_hint
from configs.schema import Model

HF, KAGGLE = "hf://", "kaggle://"
TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Settings that prepare images, videos and sound for a multimodal model."""
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
)
HF_HANDLE = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@(\S+))?")
"""Name and revision."""
HF_LOG_IN = "`hf auth login` or the environment variable HF_TOKEN"
_KAGGLE_HANDLE = re.compile(r"kaggle://([\w.-]+/[\w.-]+/(?i:flax|transformers)/[\w.-]+)(?:/(\d+))?")
_KAGGLE_LOGIN = (
    "an API token from https://www.kaggle.com/settings in KAGGLE_API_TOKEN, in KAGGLE_USERNAME "
    "and KAGGLE_KEY, or in ~/.kaggle"
)
_ASKED_FILE = "config.json"


def find_model(model: Model) -> Path:
    """The folder of the base model; a hub handle is downloaded first.

    Cached files are not downloaded again; with HF_HUB_OFFLINE=1 nothing is downloaded from there.

    Raises:
        FileNotFoundError: if the folder is missing, the hub has no such model, or the model is not
            cached and cannot be downloaded.
        ValueError: if the handle is invalid, or the hub requires a login or an accepted licence.
    """
    found = _find(model.path, setting="model.path", files=MODEL_FILES)
    assert found is not None
    return found


def locate_model(model: Model) -> Path | None:
    """As `find_model`, but downloads nothing: None if a run will download the model.

    The Hugging Face hub is asked whether it allows that; for Kaggle only a login is required.
    """
    return _find(model.path, setting="model.path", files=MODEL_FILES, download=False)


def find_tokenizer(path: str) -> Path:
    """As `find_model`, the file or folder of a tokenizer; a hub's other files are not loaded."""
    found = _find(path, setting="model.tokenizer", files=TOKENIZER_FILES)
    assert found is not None
    return found


def ask_hub(name: str, *, revision: str | None = None, kind: Literal["model", "dataset"]) -> None:
    """Asks the Hugging Face hub whether this login may download a repository.

    Raises:
        LocalEntryNotFoundError: if the hub cannot be reached.
        HfHubHTTPError: if it refuses.
    """
    import httpx
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(name, _ASKED_FILE, revision=revision, repo_type=kind)
    try:
        get_hf_file_metadata(url)
    except errors.EntryNotFoundError:  # the repository has no such file, and can be read
        return
    except (httpx.TransportError, errors.OfflineModeIsEnabled) as error:
        raise errors.LocalEntryNotFoundError(str(error)) from error


def _find(path: str, *, setting: str, files: Sequence[str], download: bool = True) -> Path | None:
    if path.startswith(HF):
        return _from_hugging_face(path, setting=setting, files=files, download=download)
    if path.startswith(KAGGLE):
        return _from_kaggle(path, setting=setting, download=download)
    found = Path(path)
    if setting == "model.path" and not found.is_dir():
        raise FileNotFoundError(f"{setting}: no folder {path}{nearest_hint(found)}")
    if not found.exists():
        raise FileNotFoundError(f"{setting}: no file or folder {path}{nearest_hint(found)}")
    return found


def _from_hugging_face(
    handle: str, *, setting: str, files: Sequence[str], download: bool
) -> Path | None:
    match = HF_HANDLE.fullmatch(handle)
    if match is None:
        raise ValueError(
            f"{setting}: {handle!r} is not hf://OWNER/NAME or hf://OWNER/NAME@REVISION"
        )
    import huggingface_hub
    from huggingface_hub import errors

    name, revision = match.groups()
    try:
        if not download:
            return _cached_or_allowed(name, revision, files=files)
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(files))
        )
    except errors.GatedRepoError:
        what = "requires an accepted licence: accept it on the model's page on the hub, then log in"
        raise ValueError(f"{setting}: {handle} {what} with {HF_LOG_IN}") from None
    except errors.RepositoryNotFoundError:
        what = f"does not exist, or is private and needs {HF_LOG_IN}"
        raise FileNotFoundError(f"{setting}: {handle} {what}") from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{setting}: {name} has no revision {revision!r}") from None
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{setting}: {handle} is not completely in the cache and {_unreachable(error)}"
        ) from None
    except errors.HfHubHTTPError as error:
        if error.response.status_code not in {401, 403}:
            raise
        what = f"the hub refuses this login ({error.response.status_code}); log in again with"
        raise ValueError(f"{setting}: {handle}: {what} {HF_LOG_IN}") from None


def _cached_or_allowed(name: str, revision: str | None, *, files: Sequence[str]) -> Path | None:
    """The cached folder with weights; None if there is none, and the hub allows a download."""
    import huggingface_hub
    from huggingface_hub import errors

    with suppress(errors.LocalEntryNotFoundError):
        found = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(files), local_files_only=True
        )
        if any(Path(found).glob("*.safetensors")):  # not only the tokenizer
            return Path(found)
    ask_hub(name, revision=revision, kind="model")
    return None


def _unreachable(error: Exception) -> str:
    """The reason why the hub was not contacted or did not answer."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE forbids the download"
    cause = error.__cause__
    return "the hub cannot be reached" + (f": {cause}" if cause else "")


def _from_kaggle(handle: str, *, setting: str, download: bool) -> Path | None:
    match = _KAGGLE_HANDLE.fullmatch(handle)
    if match is None:
        what = "kaggle://OWNER/MODEL/flax/VARIATION[/VERSION], or transformers for flax"
        raise ValueError(f"{setting}: {handle!r} is not {what}")
    cached = _kaggle_cache(*match.groups())
    # An exact version never changes, so its cache needs no check with the hub.
    if cached is not None and match[2] is not None:
        return cached
    if download:
        return _download_from_kaggle(handle, setting=setting, cached=cached)
    if cached is None and not has_kaggle_login():
        raise ValueError(f"{setting}: {handle} needs {_KAGGLE_LOGIN}")
    return cached


def has_kaggle_login() -> bool:
    """Whether downloads from Kaggle can log in; Kaggle is not asked."""
    from kagglehub.config import get_kaggle_credentials

    # In a notebook of Kaggle the session is the login.
    return bool(os.environ.get("KAGGLE_KERNEL_RUN_TYPE") or get_kaggle_credentials())


def _download_from_kaggle(handle: str, *, setting: str, cached: Path | None) -> Path:
    import kagglehub
    import requests
    from kagglehub import exceptions

    path = handle.removeprefix(KAGGLE)
    page = f"https://www.kaggle.com/models/{'/'.join(path.split('/')[:2])}"
    try:
        return Path(kagglehub.model_download(path))
    except (exceptions.UnauthenticatedError, exceptions.CredentialError):
        raise ValueError(f"{setting}: {handle} needs {_KAGGLE_LOGIN}") from None
    except exceptions.KaggleApiHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in {401, 403}:
            raise ValueError(
                f"{setting}: {handle} requires an accepted licence: accept it at {page}, then log "
                f"in with {_KAGGLE_LOGIN}"
            ) from None
        if status == 404:
            raise FileNotFoundError(f"{setting}: {handle} does not exist; see {page}") from None
        raise
    except requests.exceptions.ConnectionError as error:
        if cached is not None:
            return cached
        raise FileNotFoundError(
            f"{setting}: {handle} is not in the cache and Kaggle cannot be reached: {error}"
        ) from None


def _kaggle_cache(path: str, version: str | None) -> Path | None:
    """The folder of the requested version, or of the newest one, if completely downloaded."""
    from kagglehub.cache import Cache
    from kagglehub.handle import parse_model_handle

    handle, cache = parse_model_handle(path), Cache()
    folder = Path(cache.get_path(handle)).parent
    there = folder.iterdir() if folder.is_dir() else ()
    versions = [int(entry.name) for entry in there if entry.name.isdecimal()]
    wanted = [int(version)] if version is not None else sorted(versions, reverse=True)
    for number in wanted:
        found = cache.load_from_cache(handle.with_version(number))
        if found is not None:
            return Path(found)
    return None
