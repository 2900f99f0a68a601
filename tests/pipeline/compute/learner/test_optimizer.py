"""The learning rate of each update, and one step of AdamW by hand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipeline.compute.learner.optimizer import grpo_rate, make_optimizer, sft_rate
from tests import tiny


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, [8, 8, 8, 8, 8]),
        # The first update has a positive rate.
        ({"warmup_steps": 4}, [2, 4, 6, 8, 8, 8]),
        ({"schedule": "linear", "decay_steps": 4, "warmup_steps": 2}, [4, 8, 8, 4, 0, 0]),
        ({"schedule": "cosine", "decay_steps": 2}, [8, 4, 0, 0]),
        # Warm-up and decay are counted in steps, for any number of updates per step.
        ({"warmup_steps": 2, "updates_per_batch": 2}, [2, 4, 6, 8, 8, 8]),
        ({"schedule": "linear", "decay_steps": 2, "updates_per_batch": 2}, [8, 6, 4, 2, 0]),
    ],
)
def test_the_learning_rate_of_each_update(learner: dict[str, Any], expected: list[float]):
    schedule = grpo_rate(tiny.make_config(learner={"lr": 8.0, **learner}))
    found = [float(schedule(n)) for n in range(len(expected))]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_each_phase_has_its_own_learning_rate():
    warm = tiny.make_config(
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 4, "lr": 8.0, "warmup_steps": 2},
        budget={"steps": 10},
        learner={"schedule": "linear", "lr": 6.0},
    )
    rate = sft_rate(warm)
    np.testing.assert_allclose([rate(n) for n in range(5)], [4, 8, 8, 4, 0], atol=1e-5)
    rate = grpo_rate(warm)
    np.testing.assert_allclose([rate(n) for n in range(7)], [6, 5, 4, 3, 2, 1, 0], atol=1e-5)


def test_the_gradient_is_clipped_by_its_global_norm_and_weights_decay():
    settings = {"lr": 0.1, "max_grad_norm": 1.0, "adam_b2": 0.99, "weight_decay": 0.5}
    made = tiny.make_config(learner=settings)
    optimizer = make_optimizer(made, grpo_rate(made))
    adapter = {"x": jnp.array([1.0]), "y": jnp.array([2.0])}
    grad = {"x": jnp.array([3.0]), "y": jnp.array([-4.0])}
    updates, state = optimizer.update(grad, optimizer.init(adapter), adapter)
    first = optax.tree_utils.tree_get(state, "mu")
    second = optax.tree_utils.tree_get(state, "nu")
    np.testing.assert_allclose([first["x"][0], first["y"][0]], [0.06, -0.08], rtol=1e-5)
    np.testing.assert_allclose([second["x"][0], second["y"][0]], [0.0036, 0.0064], rtol=1e-5)
    # The first step has the size of the rate; half of a weight times the rate is subtracted.
    np.testing.assert_allclose([updates["x"][0], updates["y"][0]], [-0.15, 0.0], atol=1e-5)
