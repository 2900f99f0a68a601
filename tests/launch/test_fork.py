"""A run begins from a checkpoint of another run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.schema import Config
from launch.fork import check_base, copy_start, forked, origin
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.learner.learner import Learner
from pipeline.run.run_folder import RunFolder
from tests import tiny

ROLLOUTS = tiny.make_rollouts([(3, 20), (3, 17), (9, 25), (12, 28)], advantages=[1, -1, 0.5, -0.5])
STEP = 2


@pytest.fixture
def other(tmp_path: Path) -> tuple[Path, list[np.ndarray]]:
    """A run folder with a checkpoint of step 2; its adapter and optimizer state."""
    learner = tiny.learner()
    for _ in range(STEP):
        learner.update(ROLLOUTS)
    folder = tmp_path / "runs" / "a"
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    with_previous = dataclasses.replace(learner.state, previous=learner.state.adapter)
    checkpoints.save(with_previous, {"provenance": {"base": "b1"}})
    checkpoints.wait()
    return folder, leaves(learner)


def leaves(learner: Learner) -> list[np.ndarray]:
    state = learner.state
    return [np.array(leaf) for leaf in jax.tree.leaves((state.adapter, state.optimizer))]


def learner_of(config: Config) -> Learner:
    run, lora = config.run.model_dump(), config.lora.model_dump()
    return tiny.learner(run=run, lora=lora, learner={"lr": config.learner.lr})


def config_of(tmp_path: Path, run: Path, version: str = f"@{STEP}", **tables: Any) -> Config:
    named = {"name": "b", "dir": str(tmp_path / "runs"), "fork": f"{run}{version}"}
    return tiny.make_config(run=named, **tables)


def test_a_fork_begins_with_adapter_and_optimizer_state_under_other_settings(
    tmp_path: Path, other: tuple[Path, list[np.ndarray]]
):
    run, expected = other
    config = forked(config_of(tmp_path, run, learner={"lr": 1e-3}))
    assert config.lora.start == str(run / "checkpoints" / "2")
    folder = RunFolder.of(config)
    with folder.held():
        config = copy_start(config)
        folder.create(config)
    assert config.lora.start == str(folder.path / "start" / "2")
    shutil.rmtree(run)  # its retention may delete the checkpoint
    config = forked(config_of(tmp_path, run, learner={"lr": 1e-3}))
    assert config.lora.start == str(folder.path / "start" / "2")
    folder.check(config)
    found = origin(config)
    assert found is not None
    assert (found.step, found.provenance) == (2, {"base": "b1"})
    check_base(config, "b1")
    with pytest.raises(ValueError, match=r"run\.fork: .*@2 was trained on other weights"):
        check_base(config, "b2")
    learner = learner_of(config)
    assert (learner.state.version, learner.state.updates, learner.state.previous) == (0, 0, None)
    for one, two in zip(leaves(learner), expected, strict=True):
        np.testing.assert_array_equal(one, two)
    learner.update(ROLLOUTS)
    assert learner.state.version == 1


def test_a_fork_has_no_other_start(tmp_path: Path, other: tuple[Path, list[np.ndarray]]):
    run, _ = other
    with pytest.raises(ValueError, match=r"lora\.start: run\.fork gives the initial adapter"):
        forked(config_of(tmp_path, run, lora={"start": "/elsewhere"}))
