"""The SFT phase: its gradient, and the transition to the GRPO phase."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch.bench.harness import compilations
from pipeline.compute.learner.learner import Learner
from pipeline.compute.model.policy import Params
from pipeline.types import Demonstration
from tests import tiny
from tests.pipeline.compute.learner.reference import Whole, log_softmax
from tests.pipeline.compute.learner.test_learner import (
    LENGTHS,
    ROLLOUTS,
    UNCLIPPED,
    close,
    first_gradient,
    start,
)

DEMONSTRATIONS = [
    Demonstration(number, rollout.completion.prompt_tokens, rollout.completion.tokens)
    for number, rollout in enumerate(ROLLOUTS)
]
# Three rows of at most 42 tokens, one of them full.
PACKED = [
    (DEMONSTRATIONS[1],),
    (DEMONSTRATIONS[0], *DEMONSTRATIONS[2:5]),
    tuple(DEMONSTRATIONS[5:]),
]


def learner(*, devices: int = 1) -> Learner:
    """A learner of both phases."""
    return tiny.learner(
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 2, "lr": 1e-2, "schedule": "constant"},
        learner=UNCLIPPED | {"kl_coef": 0.5},
        plan={
            "learner_devices": devices,
            "slots": devices,
            "micro_batch_tokens": 42 * devices,
        },
    )


def reference() -> tuple[float, dict[str, np.ndarray]]:
    """The mean negative log-likelihood of the completions, one demonstration per row."""
    whole = Whole.of(ROLLOUTS)

    def loss(adapter: Params) -> jax.Array:
        scores = log_softmax(adapter, tiny.base(layers=2), whole.tokens, 1.0)
        gathered = jnp.take_along_axis(scores, jnp.asarray(whole.targets)[..., None], -1)[..., 0]
        return -jnp.where(whole.learned, gathered, 0.0).sum() / whole.learned.sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(tiny.probe(layers=2))
    return float(value), {name: np.asarray(grad) for name, grad in grads.items()}


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_gradient_equals_that_of_unpacked_demonstrations(devices: int):
    value, expected = reference()
    found = start(learner(devices=devices))
    metrics = found.sft_update(PACKED)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert metrics["tokens_trained"] == sum(new for _, new in LENGTHS)
    close(first_gradient(found), expected, bound=2e-5)


def test_the_grpo_phase_starts_with_a_new_optimizer_and_its_own_reference():
    found = start(learner())
    found.sft_update(PACKED)
    assert found.state.updates == 1
    found.sft_update(PACKED)
    state = found.state
    assert (state.version, state.updates) == (2, 0)
    moment = optax.tree_utils.tree_get(state.optimizer, "mu")
    assert all(not np.asarray(value).any() for value in moment.values())
    assert state.reference is not None
    for name, value in state.adapter.items():
        np.testing.assert_array_equal(value, state.reference[name])
    reference = {name: np.array(value) for name, value in state.reference.items()}
    first = found.update(ROLLOUTS)
    assert abs(first["kl"]) < 1e-9
    assert found.update(ROLLOUTS)["kl"] > 1e-4
    kept = found.state.reference
    assert kept is not None
    for name, value in reference.items():
        np.testing.assert_array_equal(value, kept[name])


def test_promise_7_nothing_is_compiled_in_either_phase():
    found = learner()
    with compilations() as seen:
        found.sft_update(PACKED)
        found.sft_update(PACKED[:1])
        found.update(ROLLOUTS)
    assert seen == []
