"""The exporter's process: exports a checkpoint as a training run exports its policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from actors.exporter_actor import ExporterActor
from pipeline.compute.model.adapter_file import write_adapter_file
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from tests import tiny
from tests.demo_texts import write_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3"


def test_a_checkpoint_is_written_in_all_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model").mkdir()
    model = write_tokenizer(tmp_path / "model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, model)
    mesh = make_mesh(jax.devices()[:1])
    monkeypatch.setattr("pipeline.compute.opening.open_mesh", lambda **_: mesh)
    monkeypatch.setattr("pipeline.compute.opening.check_tokenizer", lambda *_, **__: None)
    run = tmp_path / "runs" / "tiny"
    settings = {"rank": 2, "alpha": 4.0}
    described = tiny.make_config(
        run={"dir": str(run.parent)}, model={"path": str(model)}, lora=settings
    )
    config = tiny.make_config(
        run={"dir": str(run.parent)},
        model={"path": str(model)},
        lora=settings | {"start": str(run)},
    )
    policy, _ = open_policy(model, dtype="float32", lora=described.lora, mesh=mesh)
    adapter = {n: np.asarray(value) for n, value in tiny.make_probe(policy).items()}
    write_adapter_file(run / "checkpoints" / "best", adapter, version=5)
    (run / "config.json").write_text(described.model_dump_json())
    examples = [r.completion for r in tiny.make_rollouts([(3, 9)], advantages=[0.0])]

    actor = ExporterActor(config, described, examples)
    assert actor.start() == f"step 5 of {run / 'checkpoints' / 'best'}"
    out = tmp_path / "out"
    report = actor.export(str(out), ["hf", "peft", "orbax"])
    assert (report.version, report.tokens) == (5, 9)
    assert report.mean_difference is not None
    assert 0 < report.mean_difference <= 1e-4
    card = (out / "README.md").read_text()
    assert "for 5 steps" in card
    config_of_card = json.loads(card.split("```json\n")[1].split("```")[0])
    assert config_of_card["lora"]["start"] is None
    assert {path.name for path in out.iterdir()} >= {"adapter", "flax", "model.safetensors"}
