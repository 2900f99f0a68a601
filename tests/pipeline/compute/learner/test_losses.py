"""Gradients of losses, estimators of the KL; `test_objective` has values, also of the top k."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.compute.learner.batches import TopKLogprobs
from pipeline.compute.learner.losses import (
    SAMPLED_KL,
    clipped_surrogate,
    clipped_weight,
    kl_k3,
    rollout_mean,
    weighted_sum,
)
from pipeline.compute.learner.topk import forward_kl, reverse_kl, top_k_logprobs
from pipeline.compute.model.top_k import TopK

RATIOS = np.array([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]])
ADVANTAGES = np.array([[2.0] * 3, [-2.0] * 3])


def test_clipping_stops_only_the_gradient_of_clipped_tokens():
    def total(log_ratio: jax.Array) -> jax.Array:
        return clipped_surrogate(log_ratio, jnp.asarray(ADVANTAGES), low=0.2, high=0.2)[0].sum()

    grad = jax.grad(total)(jnp.log(jnp.asarray(RATIOS)))
    expected = -RATIOS * ADVANTAGES * [[1, 0, 1], [1, 1, 0]]
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


def test_at_ratio_one_the_gradient_is_reinforce():
    logprobs = jnp.log(jnp.array([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]]))
    advantages = jnp.array([[1.5] * 3, [-0.5] * 3])

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_ratio = x - jax.lax.stop_gradient(x)
        grpo, *_ = clipped_surrogate(log_ratio, advantages, low=0.2, high=0.2)
        cispo, *_ = clipped_weight(log_ratio, x, advantages, low=1.0, high=4.0)
        return grpo.sum(), cispo.sum()

    for grad in jax.jacobian(both)(logprobs):
        np.testing.assert_allclose(grad, -advantages, rtol=1e-6)


# Row 0: two rollouts with prompts of one token and two and one learned tokens, then padding.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
LEARNED = jnp.array([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1]], bool)


def test_the_gspo_gradient_flows_through_all_tokens_of_the_rollout():
    logprobs = jnp.array([[0.0, 0.2, 0.1, 0.0, 0.05, 0.0], [0.0, 0, 0.1, 0.2, 0, 0.1]])
    advantages = jnp.array([[2.0, 2, 2, -1, -1, 0], [3.0] * 6])
    # One token of each rollout has a weight; the others are part of its ratio only.
    weights = jnp.array([[0, 1.0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]])

    def total(x: jax.Array) -> jax.Array:
        ratio = rollout_mean(x, segments=SEGMENTS, learned=LEARNED)
        return weighted_sum(clipped_surrogate(ratio, advantages, low=0.5, high=0.5)[0], weights)

    # d(-A exp(mean)) = -A s / L at each of the L tokens.
    s = np.exp([0.15, 0.05, 0.1])
    expected = [[0, -s[0], -s[0], 0, s[1], 0], [0, 0, *[-3 * s[2] / 4] * 4]]
    np.testing.assert_allclose(jax.grad(total)(logprobs), expected, rtol=1e-6)


def test_the_weight_of_cispo_is_a_constant_and_drops_no_token():
    logprobs = jnp.log(jnp.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]))
    log_ratio = jnp.log(jnp.array([[1.0, 7.0, 0.5], [1.0, 7.0, 0.5]]))

    def total(log_ratio: jax.Array, logprobs: jax.Array) -> jax.Array:
        advantages = jnp.asarray(ADVANTAGES)
        return clipped_weight(log_ratio, logprobs, advantages, low=1.0, high=4.0)[0].sum()

    through_ratio, grad = jax.grad(total, argnums=(0, 1))(log_ratio, logprobs)
    np.testing.assert_allclose(grad, -ADVANTAGES * [1, 5, 0.5], rtol=1e-6)
    assert not np.asarray(through_ratio).any()


def test_k3_is_never_negative_and_small_differences_are_exact():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(-5 * rng.random((50, 20)), jnp.float32) for _ in range(2))
    assert (kl_k3(x, y) >= 0).all()
    # About d^2 / 2; in float32 exp(d) - 1 - d would be only rounding error.
    tiny = kl_k3(jnp.zeros((1, 1)), jnp.full((1, 1), 1e-3))
    np.testing.assert_allclose(tiny, 0.5e-6, rtol=1e-3)


LOGITS, OTHER = np.random.default_rng(3).standard_normal((2, 6)).astype(np.float32)


def mean_over_draws(estimator: Any) -> tuple[float, np.ndarray]:
    """Exact mean of the estimator's value and gradient over samples from the policy."""
    reference = jax.nn.log_softmax(jnp.asarray(OTHER))
    drawn = jax.nn.softmax(jnp.asarray(LOGITS))

    def value(logits: jax.Array) -> jax.Array:
        # The sampling probabilities are constant: only the estimator is differentiated.
        found = estimator(jax.nn.log_softmax(logits)[None], reference[None])[0]
        return jnp.sum(drawn * found)

    found, grad = jax.value_and_grad(value)(jnp.asarray(LOGITS))
    return float(found), np.asarray(grad)


def full_kl(first: Any, second: Any) -> Any:
    first, second = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
    return jnp.sum(jnp.exp(first) * (first - second))


def test_k1_and_k3_are_unbiased_and_k2_is_biased():
    expected = full_kl(LOGITS, OTHER)
    values = {name: mean_over_draws(estimator)[0] for name, estimator in SAMPLED_KL.items()}
    np.testing.assert_allclose([values["k1"], values["k3"]], expected, rtol=1e-5)
    assert abs(values["k2"] - expected) > 0.1 * expected


def test_k1_and_k2_have_the_kl_gradient_and_k3_that_of_the_reverse_kl():
    reverse = jax.grad(lambda x: full_kl(x, jnp.asarray(OTHER)))(jnp.asarray(LOGITS))
    forward = jax.grad(lambda x: full_kl(jnp.asarray(OTHER), x))(jnp.asarray(LOGITS))
    grads = {name: mean_over_draws(estimator)[1] for name, estimator in SAMPLED_KL.items()}
    for name, expected in (("k1", reverse), ("k2", reverse), ("k3", forward)):
        np.testing.assert_allclose(grads[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
    assert np.abs(reverse - forward).max() > 0.1
    # k1 as a plain loss term has a zero mean gradient.
    plain = mean_over_draws(lambda policy, reference: policy - reference)[1]
    np.testing.assert_allclose(plain, 0, atol=1e-6)


def test_the_weighted_sum_by_hand_ignores_nan():
    values = jnp.array([[1.0, jnp.nan, 3.0], [jnp.inf, 5.0, -1e30]])
    weights = jnp.array([[0.5, 0.0, 0.25], [0.0, 2.0, 0.0]])
    assert weighted_sum(values, weights) == 0.5 + 0.75 + 10.0


def test_an_empty_tail_of_the_top_k_gives_no_nan():
    # The first token has all mass, up to float32's rounding; then exactly all.
    for gap in (20.0, 200.0):
        near = jnp.zeros((1, 2, 12)).at[..., 0].set(gap)
        far = jnp.zeros_like(near).at[..., 5].set(gap)
        kept = top_k_logprobs(TopK(*jax.lax.top_k(jax.nn.log_softmax(near), 4)))
        assert np.isfinite(kept.tail).all()

        def both(x: jax.Array, kept: TopKLogprobs = kept) -> jax.Array:
            gathered = jnp.take_along_axis(jax.nn.log_softmax(x), kept.tokens, axis=-1)
            return (reverse_kl(gathered, kept) + forward_kl(gathered, kept)).sum()

        (close, _), (distant, _) = found = [jax.value_and_grad(both)(x) for x in (near, far)]
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
        np.testing.assert_allclose(close, 0, atol=1e-5)
        assert distant > 10
