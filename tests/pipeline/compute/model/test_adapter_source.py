"""Initial adapters from runs, checkpoints and exports; unreadable ones are errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from configs.load import config_to_json
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.learner.state import LearnerState
from pipeline.compute.model import lora
from pipeline.compute.model.adapter_file import write_adapter_file
from pipeline.compute.model.adapter_source import load_adapter, needs_separate
from tests import tiny


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 3 and 12."""
    folder = tmp_path / "run"
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    policy = tiny.policy(layers=2)
    for seed, version in enumerate((3, 12)):
        adapter = tiny.make_probe(policy, seed=seed)
        state = LearnerState(adapter, optimizer={"x": adapter}, version=version, updates=version)
        checkpoints.save(state, {})
    checkpoints.wait()
    (folder / "config.json").write_text(config_to_json(tiny.make_config()))
    return folder


def sha256(path: Path) -> tuple[int, str]:
    found = load_adapter(str(path), tiny.policy(layers=2))
    return found.version, lora.sha256(found.adapter)


def test_the_adapter_of_a_run_is_its_newest_checkpoint(run: Path):
    policy = tiny.policy(layers=2)
    newest, older = (lora.sha256(tiny.make_probe(policy, seed=seed)) for seed in (1, 0))
    assert sha256(run) == sha256(run / "checkpoints" / "12") == (12, newest)
    assert sha256(run / "checkpoints" / "3") == (3, older)
    found = load_adapter(str(run), policy)
    assert found.what == f"step 12 of {run / 'checkpoints' / '12'}"
    assert not needs_separate(tiny.LORA.model_copy(update={"start": str(run)}))


def test_the_best_adapter_by_validation_takes_precedence(run: Path):
    best = tiny.probe(layers=2)
    folder = run / "checkpoints" / "best"
    write_adapter_file(folder, {n: np.asarray(v) for n, v in best.items()}, version=7)
    assert sha256(run) == sha256(folder) == (7, lora.sha256(best))
    assert sha256(run / "checkpoints" / "12")[0] == 12


def test_an_adapter_of_another_model_or_scale_or_an_unreadable_one_is_an_error(run: Path):
    policy = tiny.policy(layers=2)
    other = dataclasses.replace(policy, lora=tiny.LORA.model_copy(update={"alpha": 3.0}))
    newest = run / "checkpoints" / "12"
    for asked, message in (
        (tiny.policy(layers=1), r"lora\.start: .*/12: this adapter does not fit"),
        (other, r"was trained with scale 2 .* here make 1$"),
    ):
        with pytest.raises(ValueError, match=message):
            load_adapter(str(run), asked)
    (newest / "state" / "_METADATA").unlink()
    with pytest.raises(ValueError, match=r"lora\.start: .*/12.* damaged: "):
        load_adapter(str(run), policy)
