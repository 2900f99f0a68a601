"""Truncation against a sort in numpy, draws against the probabilities that they should have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pipeline.decode.sampling import sample, truncate
from pipeline.model.head_blocks import FORBIDDEN

GREEDY, DRAW = jnp.float32(0.0), jnp.float32(1.0)


def kept(logits: np.ndarray, *, top_k: int, top_p: float) -> np.ndarray:
    """Which tokens stay, from the definitions; no two logits may tie."""
    order = np.argsort(-logits)
    order = order[logits[order] > FORBIDDEN]
    order = order[:top_k] if top_k else order
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    mass = np.cumsum(weights / weights.sum())
    size = len(order) if top_p == 1 else int(np.searchsorted(mass, top_p)) + 1
    stays = np.zeros(len(logits), bool)
    stays[order[:size]] = True
    return stays


@given(
    st.permutations(range(12)),
    st.integers(0, 14),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.integers(0, 3),
)
def test_truncation_is_exact(ranks: list[int], top_k: int, top_p: float, slope: float, banned: int):
    logits = (slope * np.array(ranks) + 0.01).astype(np.float32)
    logits[:banned] = FORBIDDEN
    found = np.asarray(truncate(jnp.asarray(logits)[None], top_k=top_k, top_p=top_p))[0]
    stays = kept(logits, top_k=top_k, top_p=top_p)
    np.testing.assert_array_equal(found[stays], logits[stays])
    assert (found[~stays] == FORBIDDEN).all()


def test_the_nucleus_by_hand():
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    for top_p, stays in ((0.4, [1]), (0.6, [1, 3]), (0.8, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        found = np.asarray(truncate(logits, top_k=0, top_p=top_p))[0]
        assert np.flatnonzero(found > FORBIDDEN).tolist() == stays
    # Of the two that top-k leaves, the first has 2/3 of the mass.
    found = np.asarray(truncate(logits, top_k=2, top_p=0.6))[0]
    assert np.flatnonzero(found > FORBIDDEN).tolist() == [1]


def test_top_k_alone_keeps_k_however_unlikely():
    logits = jnp.array([[0.0, 40.0, -1.0, 39.0, -40.0]])
    found = np.asarray(truncate(logits, top_k=4, top_p=1.0))[0]
    assert np.flatnonzero(found > FORBIDDEN).tolist() == [0, 1, 2, 3]


def test_ties_with_the_last_one_stay():
    logits = jnp.array([[1.0, 2.0, 1.0, 0.0]])
    found = np.asarray(truncate(logits, top_k=2, top_p=1.0))[0]
    assert np.flatnonzero(found > FORBIDDEN).tolist() == [0, 1, 2]


def test_off_means_untouched():
    logits = jnp.array([[1.0, -3.0, FORBIDDEN]])
    assert truncate(logits, top_k=0, top_p=1.0) is logits


def keys_for(rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (rows, 2), np.uint32))


ROWS = 20_000
PROBABILITIES = np.array([0.02, 0.4, 0.0, 0.25, 0.08, 0.25])
LOGITS = np.where(PROBABILITIES > 0, np.log(np.maximum(PROBABILITIES, 1e-9)), FORBIDDEN)


def draw(*, top_k: int = 0, top_p: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (ROWS, len(LOGITS)))
    found = sample(logits, keys_for(ROWS), noise=DRAW, top_k=top_k, top_p=top_p)
    return np.asarray(found[0]), np.asarray(found[1])


@pytest.mark.parametrize(
    ("limits", "stays"),
    [({}, [0, 1, 3, 4, 5]), ({"top_k": 1}, [1]), ({"top_p": 0.95}, [1, 3, 4, 5])],
)
def test_draws_have_their_probabilities(limits: dict[str, int], stays: list[int]):
    tokens, logprobs = draw(**limits)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    expected = np.zeros(len(LOGITS))
    expected[stays] = PROBABILITIES[stays] / PROBABILITIES[stays].sum()
    assert counts[expected == 0].sum() == 0
    if len(stays) > 1:
        fit = stats.chisquare(counts[stays], ROWS * expected[stays])
        assert fit.pvalue > 1e-3
    # Of the full distribution, whatever was cut away.
    np.testing.assert_allclose(logprobs, np.log(PROBABILITIES[tokens]), rtol=1e-5)


def test_greedy_takes_the_likeliest():
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((50, 9)), jnp.float32)
    tokens, logprobs = sample(logits, keys_for(50), noise=GREEDY, top_k=0, top_p=1.0)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    expected = jax.nn.log_softmax(logits)[jnp.arange(50), tokens]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)
