"""The KL over the top k and one bucket, against the full distribution of a small vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compute.learner.batches import TopKLogprobs
from pipeline.compute.learner.topk import (
    forward_kl,
    reverse_kl,
    top_k_logprobs,
)
from pipeline.compute.model.top_k import TopK

VOCAB = 12


def distributions(seed: int, *, spread: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Log-probs of two distributions at 2 x 3 positions, over the whole vocabulary."""
    rng = np.random.default_rng(seed)
    logits = spread * rng.standard_normal((2, 2, 3, VOCAB)).astype(np.float32)
    first, second = jax.nn.log_softmax(jnp.asarray(logits))
    return first, second


def kept_of(logprobs: jax.Array, k: int) -> TopKLogprobs:
    return top_k_logprobs(TopK(*jax.lax.top_k(logprobs, k)))


def at(logprobs: jax.Array, kept: TopKLogprobs) -> jax.Array:
    return jnp.take_along_axis(logprobs, kept.tokens, axis=-1)


def true_kl(first: jax.Array, second: jax.Array) -> np.ndarray:
    p, q = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return np.sum(np.exp(p) * (p - q), axis=-1)


def rounding(of: jax.Array, to: jax.Array, kept: TopKLogprobs) -> np.ndarray:
    """Bound of the float32 error of sum p log(p / q): a tail q is 1 minus the rest."""
    tails = []
    for logprobs in (of, to):
        inside = np.exp(np.asarray(at(logprobs, kept), np.float64)).sum(axis=-1)
        tails.append(np.maximum(1 - inside, 0))
    return 1e-5 + 5e-7 * tails[0] / np.maximum(tails[1], 1e-7)


@given(st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 6.0]))
def test_the_top_k_kl_is_a_lower_bound_that_rises_with_k(seed: int, spread: float):
    policy, other = distributions(seed, spread=spread)
    for function, of, to in ((reverse_kl, policy, other), (forward_kl, other, policy)):
        expected = true_kl(of, to)
        below = np.zeros_like(expected)
        for k in (1, 2, 4, 8, VOCAB):
            kept = kept_of(other, k)
            found = np.asarray(function(at(policy, kept), kept), np.float64)
            slack = rounding(of, to, kept)
            assert (found <= expected + slack).all()
            assert (found >= below - slack).all()
            below = found - slack
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_an_empty_tail_gives_no_nan():
    # The first token has all mass, up to float32's rounding; then exactly all.
    for gap in (20.0, 200.0):
        logits = jnp.zeros((1, 2, VOCAB)).at[..., 0].set(gap)
        kept = kept_of(jax.nn.log_softmax(logits), 4)
        assert np.isfinite(kept.tail).all()

        def both(x: jax.Array, kept: TopKLogprobs = kept) -> jax.Array:
            gathered = at(jax.nn.log_softmax(x), kept)
            return (reverse_kl(gathered, kept) + forward_kl(gathered, kept)).sum()

        near, far = logits, jnp.zeros_like(logits).at[..., 5].set(gap)
        for x in (near, far):
            value, grad = jax.jit(jax.value_and_grad(both))(x)
            assert np.isfinite(value)
            assert np.isfinite(grad).all()
        np.testing.assert_allclose(both(near), 0, atol=1e-5)
        assert both(far) > 10
