"""The highest scores by columns, against a full sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.model.top_k import MOST, Columns

ROWS, VOCAB = 8, 20_000


@jax.jit
def by_columns(scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `MOST` highest, from blocks of 7,000 scores."""
    blocks = [
        Columns.of(scores[:, start : start + 7000].T, jnp.int32(start))
        for start in range(0, scores.shape[1], 7000)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *blocks).merged().highest(MOST)


def check(scores: np.ndarray) -> np.ndarray:
    """Compares what is exact with a stable sort; returns what is."""
    values, ids, is_exact = by_columns(jnp.asarray(scores, jnp.float32))
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :MOST]
    exact = np.asarray(is_exact)
    np.testing.assert_array_equal(np.asarray(ids)[exact], expected[exact])
    sorted_scores = np.take_along_axis(scores, expected, axis=-1)
    np.testing.assert_array_equal(np.asarray(values)[exact], sorted_scores[exact])
    return exact


def random_scores(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, VOCAB)).astype(np.float32)


def test_random_scores_are_exact():
    assert check(random_scores(2)).mean() > 0.8


def test_a_column_full_of_the_highest_is_not_exact():
    scores = random_scores(0)
    before = check(scores)
    scores[3, 11 : 11 + 4 * 2048 : 2048] = 10 + np.arange(4)
    after = check(scores)
    assert before[3]
    assert not after[3]
    np.testing.assert_array_equal(np.delete(after, 3), np.delete(before, 3))


@pytest.mark.parametrize("levels", [1, 3, 500])
def test_ties_are_in_order_of_the_token_or_not_exact(levels: int):
    scores = np.random.default_rng(0).integers(0, levels, (ROWS, VOCAB)).astype(np.float32)
    check(scores)
    # Few equal scores at the top, as of tokens that training has never seen.
    scores = random_scores(1)
    scores[:, 100:160] = 7.0
    assert check(scores).any()


def test_fewer_scores_than_columns_are_always_exact():
    scores = random_scores(0)[:, :1000]
    scores[:, 3:700] = -1e30  # forbidden tokens
    assert check(scores).all()
