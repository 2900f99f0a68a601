"""The loss by hand, its gradient, and Tunix's values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline.learner.losses import clipped_policy_loss, kl_k3, weighted_sum

RATIOS = np.array([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]])
ADVANTAGES = np.array([2.0, -2.0])


def policy_loss(ratios: Any, advantages: Any, *, epsilon: float) -> tuple[Any, Any]:
    old = jnp.full(np.shape(ratios), -1.0)
    return clipped_policy_loss(
        jnp.log(jnp.asarray(ratios)) + old, old, jnp.asarray(advantages), epsilon=epsilon
    )


def test_the_loss_by_hand():
    loss, clipped = policy_loss(RATIOS, ADVANTAGES, epsilon=0.2)
    # -min(r A, clip(r) A): A = 2 is bounded above 1.2, A = -2 below 0.8.
    np.testing.assert_allclose(loss, [[-2.0, -2.4, -1.0], [2.0, 3.0, 1.6]], rtol=1e-6)
    np.testing.assert_array_equal(clipped, [[0, 1, 0], [0, 0, 1]])


def test_clipping_stops_the_gradient_where_it_is_active_and_only_there():
    old = jnp.zeros((2, 3))

    def total(logprobs: jax.Array) -> jax.Array:
        return clipped_policy_loss(logprobs, old, jnp.asarray(ADVANTAGES), epsilon=0.2)[0].sum()

    grad = jax.grad(total)(jnp.log(jnp.asarray(RATIOS)))
    expected = -RATIOS * ADVANTAGES[:, None] * [[1, 0, 1], [1, 1, 0]]
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_the_clip_range_is_epsilon_wide(epsilon: float):
    ratios = np.array([[1 + epsilon - 0.01, 1 + epsilon + 0.01, 1 - epsilon - 0.01]])
    for sign, expected in ((1.0, [0, 1, 0]), (-1.0, [0, 0, 1])):
        _, clipped = policy_loss(ratios, [sign], epsilon=epsilon)
        np.testing.assert_array_equal(clipped[0], expected)


def test_at_ratio_one_the_gradient_is_reinforce():
    logprobs = jnp.log(jnp.array([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]]))
    advantages = jnp.array([1.5, -0.5])

    def grpo(x: jax.Array) -> jax.Array:
        old = jax.lax.stop_gradient(x)
        return clipped_policy_loss(x, old, advantages, epsilon=0.2)[0].sum()

    def reinforce(x: jax.Array) -> jax.Array:
        return -(x * advantages[:, None]).sum()

    np.testing.assert_allclose(jax.grad(grpo)(logprobs), jax.grad(reinforce)(logprobs), rtol=1e-6)


def test_k3_by_hand():
    policy, reference = np.array([[0.5, 0.2]]), np.array([[0.5, 0.4]])
    found = kl_k3(jnp.log(policy), jnp.log(reference))
    np.testing.assert_allclose(found, [[0.0, 2 - 1 - np.log(2)]], rtol=1e-5, atol=1e-7)


def test_k3_is_never_negative_and_small_differences_are_exact():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(-5 * rng.random((50, 20)), jnp.float32) for _ in range(2))
    assert (kl_k3(x, y) >= 0).all()
    # To second order half the square; in float32 exp(d) - 1 - d would be rounding alone.
    tiny = kl_k3(jnp.zeros((1, 1)), jnp.full((1, 1), 1e-3))
    np.testing.assert_allclose(tiny, 0.5e-6, rtol=1e-3)


def test_k3_is_unbiased():
    rng = np.random.default_rng(0)
    policy, reference = (rng.dirichlet(np.ones(6)) for _ in range(2))
    expected = np.sum(policy * np.log(policy / reference))
    # The mean over the policy's own distribution, exactly.
    values = kl_k3(jnp.log(policy)[None], jnp.log(reference)[None])[0]
    np.testing.assert_allclose(np.sum(policy * np.asarray(values)), expected, rtol=1e-5)


def test_the_weighted_sum_by_hand_and_past_nan():
    values = jnp.array([[1.0, jnp.nan, 3.0], [jnp.inf, 5.0, -1e30]])
    weights = jnp.array([[0.5, 0.0, 0.25], [0.0, 2.0, 0.0]])
    assert weighted_sum(values, weights) == 0.5 + 0.75 + 10.0


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean"])
def test_values_and_gradients_are_tunixs(monkeypatch: pytest.MonkeyPatch, aggregation: str):
    algo_core = pytest.importorskip("tunix.rl.algo_core")
    rng = np.random.default_rng(0)
    rows, seq, epsilon, beta = 4, 6, 0.2, 0.3
    logprobs, old, reference = (-2 * rng.random((3, rows, seq))).astype(np.float32)
    advantages = rng.standard_normal(rows).astype(np.float32)
    mask = (np.arange(seq) < np.array([6, 3, 1, 5])[:, None]).astype(np.float32)
    counts = mask.sum(axis=1, keepdims=True)
    weights = mask / (mask.sum() if aggregation == "token-mean" else rows * counts)

    def ours(x: jax.Array) -> jax.Array:
        loss, _ = clipped_policy_loss(x, jnp.asarray(old), jnp.asarray(advantages), epsilon=epsilon)
        loss += beta * kl_k3(x, jnp.asarray(reference))
        return weighted_sum(loss, jnp.asarray(weights))

    example = SimpleNamespace(
        prompt_ids=None,
        completion_ids=jnp.ones((rows, seq), jnp.int32),
        completion_mask=jnp.asarray(mask),
        advantages=jnp.asarray(advantages),
        old_per_token_logps=jnp.asarray(old),
        ref_per_token_logps=jnp.asarray(reference),
    )
    settings = SimpleNamespace(
        beta=beta,
        epsilon=epsilon,
        loss_algo="grpo",
        loss_agg_mode=aggregation,
        temperature=1.0,
        kl_loss_mode="low_var_kl",
        kl_clamp_value=None,
    )

    def theirs(x: jax.Array) -> jax.Array:
        # The log-probs are given; everything after them is Tunix's.
        def given(*_: Any, **__: Any) -> tuple[jax.Array, jax.Array]:
            return x, jnp.zeros((rows, seq, 2))

        monkeypatch.setattr(algo_core.common, "compute_per_token_logps", given)
        return algo_core.grpo_loss_fn(nnx.Module(), example, settings, 0, 1)[0]

    x = jnp.asarray(logprobs)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(theirs)(x), rtol=1e-5, atol=1e-7)
