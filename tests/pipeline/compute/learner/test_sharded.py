"""A learner whose base is sharded over fsdp and tp makes the same updates as one device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

from pipeline.compute.learner.learner import Learner
from tests import tiny

MESHES = (
    (4, 2),
    pytest.param(2, 2, marks=pytest.mark.slow),
    pytest.param(8, 1, marks=pytest.mark.slow),
    pytest.param(1, 2, marks=pytest.mark.slow),
)
"""(fsdp, tp) on eight devices; data has the remaining ones."""
ROLLOUTS = tiny.make_rollouts(
    [(5, 9), (14, 28), (1, 3), (8, 20), (3, 1), (10, 12)],
    advantages=[1.0, -0.5, 2.0, -1.5, 0.7, -0.2],
)


Updated = tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, float]]
"""An adapter, Adam's first moment, which is a tenth of the gradient, and metrics."""


def updated(learner: Learner) -> Updated:
    """State and metrics after one update of the probe adapter."""
    probe = {name: np.asarray(value) for name, value in tiny.probe(layers=2).items()}
    adapter = learner.policy.place_adapter(probe)
    learner.state = dataclasses.replace(learner.state, adapter=adapter)
    metrics = learner.update(ROLLOUTS)
    moment = optax.tree_utils.tree_get(learner.state.optimizer, "mu")
    return *jax.device_get((learner.state.adapter, moment)), metrics


@pytest.fixture(scope="module")
def expected() -> Updated:
    return updated(tiny.learner(learner={"kl_coef": 0.1}))


@pytest.mark.parametrize(("fsdp", "tp"), MESHES)
def test_a_sharded_update_equals_that_of_one_device(fsdp: int, tp: int, expected: Updated):
    row = tiny.make_config().rollout.max_tokens
    plan = {"learner_devices": 8, "fsdp": fsdp, "tp": tp, "slots": 8}
    learner = tiny.learner(
        learner={"kl_coef": 0.1}, plan=plan | {"micro_batch_tokens": 8 // tp * row}
    )
    *arrays, metrics = updated(learner)
    *wanted, others = expected
    for found, values in zip(arrays, wanted, strict=True):
        for name, value in values.items():
            assert np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value), name
    for name in metrics.keys() - {"tokens_padded", "padded_share"}:
        assert metrics[name] == pytest.approx(others[name], rel=1e-5, abs=1e-6), name
    for value in learner.state.adapter.values():
        assert value.is_fully_replicated
