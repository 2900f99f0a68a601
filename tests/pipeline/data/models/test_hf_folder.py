"""Checks of a model folder's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.data.models.hf_folder import (
    FLAX_MARKS,
    INDEX,
    SINGLE,
    check_folder,
    flax_folder,
    stored_tensors,
)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("README.md", "", " has no config.json"),
        ("config.json", "{", "/config.json is not JSON"),
        ("config.json", '{"model_type": "gemma"}', ": config.json: model_type is"),
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "google/gemma"}',
            " is a PEFT adapter; set model.path to its base ('google/gemma')",
        ),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, name: str, content: str, what: str):
    with pytest.raises(FileNotFoundError, match=rf"model\.path: no folder {tmp_path}/gone"):
        check_folder(tmp_path / "gone")
    (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        check_folder(tmp_path)
    assert str(raised.value).startswith(f"model.path: {tmp_path}{what}")


def test_all_files_of_the_index_are_needed(tmp_path: Path):
    shards = {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    save_file({"b": np.ones(1)}, tmp_path / "1.safetensors")
    with pytest.raises(FileNotFoundError, match=r"lacks 2\.safetensors$"):
        stored_tensors(tmp_path)
    save_file({"a": np.ones(1), "c": np.ones(1)}, tmp_path / "2.safetensors")
    assert set(stored_tensors(tmp_path)) == {"a", "b", "c"}
    # A single file makes an index stale, as in transformers.
    save_file({"d": np.ones(1)}, tmp_path / SINGLE)
    assert set(stored_tensors(tmp_path)) == {"d"}


GOLDEN = Path(__file__).parents[3] / "golden" / "gemma3"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of transformers."""
    for name in ("config.json", SINGLE):
        shutil.copyfile(GOLDEN / name, tmp_path / name)
    return tmp_path


def edit(folder: Path, **changes: np.ndarray | None) -> None:
    """Changes tensors; None removes one."""
    tensors = load_file(folder / SINGLE) | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / SINGLE)


def test_buffers_and_tied_heads_are_accepted(folder: Path):
    embedding = load_file(folder / SINGLE)[EMBEDDING]
    edit(
        folder,
        lm_head__weight=embedding,
        model__rotary_emb__inv_freq=np.ones(4, np.float32),
        model__rotary_emb_local__inv_freq=np.ones(4, np.float32),
        model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32),
    )
    check_folder(folder)
    index = dict.fromkeys(load_file(folder / SINGLE), "a.safetensors")
    edit(folder, lm_head__weight=None)
    (folder / SINGLE).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    check_folder(folder)


def test_tensors_are_checked_without_reading_them(folder: Path):
    edit(
        folder,
        model__norm__weight=None,
        model__extra=np.ones(1, np.float32),
        model__layers__0__mlp__up_proj__weight=np.ones((2, 3), np.int8),
    )
    with pytest.raises(ValueError, match="does not fit its configuration") as raised:
        check_folder(folder)
    lines = [line.split(" (")[0] for line in str(raised.value).splitlines()[1:]]
    name = "model.layers.0.mlp.up_proj.weight"
    assert lines == [
        "  missing: model.norm.weight",
        "  surplus: model.extra",
        f"  shape of {name}:",
        f"  dtype of {name}: I8; supported: float32, float16, bfloat16",
    ]


@pytest.mark.parametrize("mark", FLAX_MARKS)
def test_a_flax_checkpoint_is_the_folder_or_a_subfolder(tmp_path: Path, mark: str):
    (tmp_path / "other").mkdir()
    assert flax_folder(tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        check_folder(tmp_path)
    inner = tmp_path / "gemma3-1b-it"
    inner.mkdir()
    (inner / mark).touch()
    assert flax_folder(tmp_path) == inner
    assert flax_folder(inner) == inner
    check_folder(tmp_path)
    (tmp_path / SINGLE).touch()
    assert flax_folder(tmp_path) is None
