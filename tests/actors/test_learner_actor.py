"""The learner's process: published adapters, and recovery of the best one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.learner_actor import LearnerActor
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.model import lora
from pipeline.run.run_folder import RunFolder
from tests import tiny
from tests.pipeline.compute.learner.test_learner import ahead, usual


def test_the_previous_version_is_published_with_rollouts_ahead():
    actor = LearnerActor(tiny.make_config())
    actor.learner = ahead()
    sent = {}
    for _ in range(2):
        (version, sha256), _ = actor.publish(which="current")
        sent[version] = sha256
        actor.update(tiny.make_rollouts([(3, 9), (14, 28)], advantages=[1.0, -1.0]))
    label, payload = actor.publish(which="previous")
    assert label == (1, sent[1])
    assert lora.sha256(payload) == sent[1] != sent[0]
    assert all(isinstance(value, np.ndarray) for value in payload.values())


def trained(folder: Path) -> LearnerActor:
    """A learner after one update, in an empty run folder."""
    config = tiny.make_config(run={"dir": str(folder), "name": "run"})
    RunFolder.of(config).path.mkdir()
    actor = LearnerActor(config)
    actor.learner = usual()
    actor.checkpoints = Checkpoints(RunFolder.of(config).checkpoints, keep=2)
    update(actor)
    return actor


def update(actor: LearnerActor) -> None:
    actor.update(tiny.make_rollouts([(3, 9), (14, 28)], advantages=[1.0, -1.0]))


def test_the_initial_adapter_is_available_after_a_step(tmp_path: Path):
    actor = trained(tmp_path)
    (version, sha256), adapter = actor.publish(which="initial")
    assert (version, sha256) == (0, usual().adapter_sha256)
    # A fresh LoRA changes nothing: one of the two factors is zero.
    assert all(not value.any() for name, value in adapter.items() if name.endswith("_lora_b"))


@pytest.mark.parametrize("file", ["whole", "missing", "other version"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_the_best_adapter_is_that_of_its_file_or_a_checkpoint(
    tmp_path: Path, file: str, checkpoint: bool
):
    actor = trained(tmp_path)
    if checkpoint:
        actor.save({})
    actor.keep_best()
    (version, sha256), _ = actor.publish(which="best")
    update(actor)
    if file == "missing":
        (RunFolder.of(actor.config).checkpoints / "best" / "adapter.safetensors").unlink()
    elif file == "other version":
        actor.keep_best()
    if file == "whole" or checkpoint:
        actor.recover_best(version, sha256)
        assert actor.publish(which="best")[0] == (version, sha256)
    else:
        with pytest.raises(ValueError, match=r"best is not the best version .*/1 is gone; put"):
            actor.recover_best(version, sha256)
