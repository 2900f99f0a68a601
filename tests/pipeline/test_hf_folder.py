"""Which files a model folder must have, told before devices are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.hf_folder import INDEX, SINGLE, read_config, weight_files


def test_the_config_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}', encoding="utf-8")
    assert read_config(tmp_path) == {"hidden_size": 8}


def test_a_missing_folder_and_a_folder_of_something_else_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=rf"model\.path: no folder {tmp_path}/gone"):
        read_config(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=rf"model\.path: {tmp_path} has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "what"), [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "is not a JSON")]
)
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes, what: str):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.path: {tmp_path}/config\.json {what}"):
        read_config(tmp_path)


def test_a_single_file_of_weights(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} lacks model\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / SINGLE).touch()
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


def test_all_files_of_the_index_are_needed(tmp_path: Path):
    (tmp_path / SINGLE).touch()
    shards = {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    (tmp_path / "1.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"lacks 2\.safetensors$"):
        weight_files(tmp_path)
    (tmp_path / "2.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]


@pytest.mark.parametrize(
    "content", ["{", "{}", "[]", {"weight_map": []}, {"weight_map": {"a": {}}}]
)
def test_a_damaged_index_is_named(tmp_path: Path, content: Any):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"model\.path: {tmp_path}/{INDEX} (is damaged|is not )"):
        weight_files(tmp_path)
