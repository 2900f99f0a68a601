"""Folders and hub handles, with hubs that are not asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import huggingface_hub
import kagglehub
import pytest
import requests
from huggingface_hub import errors

from configs.schema import Model
from pipeline.data.models.model_source import (
    MODEL_FILES,
    TOKENIZER_FILES,
    find_model,
    find_tokenizer,
)


def find(path: object) -> Path:
    return find_model(Model(path=str(path)))


def test_a_local_folder_is_used_in_place_and_handles_have_a_form(tmp_path: Path):
    assert find(tmp_path) == tmp_path
    with pytest.raises(FileNotFoundError, match=rf"^model\.path: no folder {tmp_path}/gone$"):
        find(tmp_path / "gone")
    file = tmp_path / "tokenizer.model"
    file.touch()
    with pytest.raises(FileNotFoundError, match=r"^model\.path: no folder .*model: it is a file$"):
        find(file)
    assert find_tokenizer(str(file)) == file
    with pytest.raises(ValueError, match=r"is not hf://OWNER/NAME or hf://OWNER/NAME@REVISION"):
        find("hf://gemma")
    with pytest.raises(ValueError, match=r"VARIATION\[/VERSION\], or transformers for flax"):
        find("kaggle://google/gemma-3/keras/1b")


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_only_needed_files_of_a_hugging_face_model_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    name, model, tokenizer = "google/gemma-3-1b-it", list(MODEL_FILES), list(TOKENIZER_FILES)
    assert find(f"hf://{name}") == tmp_path
    assert find(f"hf://{name}@v1.0") == tmp_path
    assert find_tokenizer(f"hf://{name}") == tmp_path
    assert hub.call_args_list == [
        call(name, revision=None, allow_patterns=model),
        call(name, revision="v1.0", allow_patterns=model),
        call(name, revision=None, allow_patterns=tokenizer),
    ]


def http_error(kind: Any, status: int) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("as the hub says", response=response)


@pytest.mark.parametrize(
    ("answer", "kind", "what"),
    [
        (http_error(errors.GatedRepoError, 403), ValueError, "requires an accepted licence: accep"),
        (
            http_error(errors.RepositoryNotFoundError, 401),
            FileNotFoundError,
            "does not exist, or is private and needs `hf auth login` or .* HF_TOKEN",
        ),
        (
            http_error(errors.HfHubHTTPError, 401),
            ValueError,
            r"the hub refuses this login \(401\); log in again with",
        ),
        (
            errors.LocalEntryNotFoundError("long words"),
            FileNotFoundError,
            "is not completely in the cache and the hub cannot be reached$",
        ),
    ],
)
def test_hugging_face_errors_are_explained(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, kind: type[Exception], what: str
):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=answer))
    with pytest.raises(kind, match=what) as raised:
        find("hf://google/gemma@v9")
    assert str(raised.value).startswith("model.path: ")
    assert "\n" not in str(raised.value)


VARIATION = "google/gemma-3/flax/gemma3-1b-it"


def test_a_kaggle_model_is_downloaded_unless_it_is_completely_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
    cache = tmp_path / "models" / VARIATION
    for version in (2, 10, 11):
        (cache / str(version)).mkdir(parents=True)
    for version in (2, 10):  # 11 is half downloaded
        (cache / f"{version}.complete").touch()
    hub = Mock(return_value=str(cache / "12"))
    monkeypatch.setattr(kagglehub, "model_download", hub)
    assert find(f"kaggle://{VARIATION}/2") == cache / "2"
    hub.assert_not_called()
    assert find(f"kaggle://{VARIATION}/11") == cache / "12"
    assert find(f"kaggle://{VARIATION}") == cache / "12"
    assert hub.call_args_list == [call(f"{VARIATION}/11"), call(VARIATION)]
    # Without a network the newest complete version is used.
    hub.side_effect = requests.exceptions.ConnectionError("no route")
    assert find(f"kaggle://{VARIATION}") == cache / "10"
    with pytest.raises(FileNotFoundError, match="Kaggle cannot be reached: no route"):
        find("kaggle://google/gemma-2/flax/gemma2-2b-it")
