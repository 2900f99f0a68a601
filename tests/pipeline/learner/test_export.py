"""The export is the trained policy, replaces the one before, and never a good one by a bad one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.datatypes import Completion
from pipeline.learner import export as export_module
from pipeline.learner.export import export, merged
from pipeline.learner.learner import Learner
from pipeline.model import save
from tests import tiny


@pytest.fixture
def learner() -> Learner:
    """With an adapter that changes every output."""
    learner = tiny.learner(learner={"max_grad_norm": 1e6, "adam_b1": 0.9})
    adapter = learner.policy.place_adapter(jax.device_get(tiny.probe(layers=2)))
    learner.state = dataclasses.replace(learner.state, adapter=adapter)
    return learner


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """The folder that the base came from."""
    folder = tmp_path / "base"
    folder.mkdir()
    config = tiny.hf_config(num_hidden_layers=2)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(b"pieces")
    return folder


def examples() -> list[Completion]:
    lengths = [(3, 9), (14, 20), (1, 2)]
    return [r.completion for r in tiny.make_rollouts(lengths, advantages=[0.0] * 3)]


def test_what_is_loaded_back_is_the_trained_policy(tmp_path: Path, learner: Learner, like: Path):
    folder = tmp_path / "run" / "export"
    report = export(learner, folder, like=like, examples=examples())
    assert report.folder == str(folder)
    assert report.tokens == 31
    reloaded = learner.policy.load_base(folder)
    expected = learner.score(examples(), adapter=learner.state.adapter)
    found = learner.score(examples(), adapter=learner.policy.no_adapter(), base=reloaded)
    difference = np.abs(np.concatenate(found) - np.concatenate(expected)).max()
    assert difference == report.max_difference <= 1e-4
    plain = learner.score(examples(), adapter=learner.policy.no_adapter())
    assert np.abs(np.concatenate(plain) - np.concatenate(expected)).max() > 0.1
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.model",
        "model.safetensors",
    }
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def test_only_adapted_matrices_change(learner: Learner):
    whole = merged(learner.policy, learner.base, learner.state.adapter)
    for name, value in learner.base.items():
        adapted = f"{name}_lora_a" in learner.state.adapter
        assert (whole[name] != value).any() == adapted, name
        assert whole[name].dtype == value.dtype


def test_an_existing_export_is_replaced(tmp_path: Path, learner: Learner, like: Path):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "stale").write_text("old")
    # Left behind by a process that died half-way through a replacement.
    for name in ("export.old", "export.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stale").write_text("older")
    export(learner, folder, like=like, examples=examples())
    first = load_file(folder / "model.safetensors")
    assert not (folder / "stale").exists()
    learner.update(tiny.make_rollouts([(3, 9), (14, 20)], advantages=[1.0, -1.0]))
    export(learner, folder, like=like, examples=examples())
    second = load_file(folder / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    assert (first[key] != second[key]).any()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "export"}


def test_a_failed_verification_leaves_the_old_export(
    tmp_path: Path, learner: Learner, like: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "export"
    export(learner, folder, like=like, examples=examples())
    before = (folder / "model.safetensors").read_bytes()

    def wrong(folder: Path, params: dict[str, np.ndarray], *, like: Path) -> None:
        name = "layers.1.mlp.down_proj.kernel"
        save.save_folder(folder, params | {name: params[name] + np.float32(0.01)}, like=like)

    stub = type("save", (), {"save_folder": staticmethod(wrong)})
    monkeypatch.setattr(export_module, "save", stub)
    with pytest.raises(RuntimeError, match=r"scores tokens differently from the policy: .*, allow"):
        export(learner, folder, like=like, examples=examples())
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_nan_is_no_agreement(
    tmp_path: Path, learner: Learner, like: Path, monkeypatch: pytest.MonkeyPatch
):
    base = dict(learner.base)
    base["final_norm.scale"] = base["final_norm.scale"] * np.nan
    monkeypatch.setattr(learner, "base", base)
    with pytest.raises(RuntimeError, match="differently from the policy: nan"):
        export(learner, tmp_path / "export", like=like, examples=examples())
    assert not (tmp_path / "export").exists()
