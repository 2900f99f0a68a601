"""A checkpoint continues on another number of devices: the same state, updates up to rounding."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.learner.learner import Learner
from pipeline.types import Rollout
from tests import tiny
from tests.pipeline.compute.learner.test_learner import UNCLIPPED

SHAPES = [(3, 20), (3, 17), (9, 25), (12, 28)]


def rollouts(seed: int) -> list[Rollout]:
    return tiny.make_rollouts(SHAPES, advantages=[1.0, -1.0, 0.5, -0.5], seed=seed)


def leaves(learner: Learner) -> list[np.ndarray]:
    state = learner.state
    return [np.array(leaf) for leaf in jax.tree.leaves((state.adapter, state.optimizer))]


def test_a_run_continues_on_other_devices_up_to_rounding(tmp_path: Path):
    first = tiny.learner(learner=UNCLIPPED)
    first.update(rollouts(0))
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(first.state, {"step": 1})
    checkpoints.wait()
    saved = leaves(first)
    first.update(rollouts(1))
    second = tiny.learner(learner=UNCLIPPED, plan={"learner_devices": 4, "fsdp": 2})
    found = Checkpoints(tmp_path, keep=1).restore(second.state)
    assert found is not None
    expected = jax.tree.leaves((second.state.adapter, second.state.optimizer))
    second.state, _ = found
    for one, other in zip(leaves(second), saved, strict=True):
        np.testing.assert_array_equal(one, other)
    restored = jax.tree.leaves((second.state.adapter, second.state.optimizer))
    assert [one.sharding for one in restored] == [one.sharding for one in expected]
    second.update(rollouts(1))
    assert second.state.version == first.state.version == 2
    for one, other in zip(leaves(second), leaves(first), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
