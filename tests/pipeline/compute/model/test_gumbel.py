"""Gumbel noise of tokens: a function of key and id, with the exact distribution to its tails."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pipeline.compute.model.gumbel import TILE, gumbel_noise, keys_at, noise_of_words


def keys_for(rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (rows, 2), np.uint32))


def test_promise_2_noise_is_a_function_of_key_position_and_token_alone():
    keys, positions = keys_for(4), jnp.array([0, 5, 0, 5])
    noise = np.asarray(gumbel_noise(keys_at(keys, positions), 0, 33))
    alone = np.asarray(gumbel_noise(keys_at(keys[2:3], positions[2:3]), 0, 33))
    np.testing.assert_array_equal(noise[2:3], alone)
    mixed = np.asarray(gumbel_noise(keys_at(keys[::-1], positions[::-1]), 0, 33))
    np.testing.assert_array_equal(noise, mixed[::-1])
    other = np.asarray(gumbel_noise(keys_at(keys, positions + 1), 0, 33))
    assert (noise != other).all(axis=1).all()
    assert len(np.unique(noise)) == noise.size


@pytest.mark.parametrize("stretch", [(3, 400), (127, 2), (511, 513), (TILE, 2 * TILE)])
def test_any_range_has_the_noise_of_its_tokens(stretch: tuple[int, int]):
    first, size = stretch
    whole = np.asarray(gumbel_noise(keys_for(3), 0, 4 * TILE))
    aligned = first % TILE == size % TILE == 0
    part = np.asarray(gumbel_noise(keys_for(3), jnp.int32(first), size, aligned=aligned))
    np.testing.assert_array_equal(part, whole[:, first : first + size])


def test_the_noise_is_gumbel_and_independent_between_tokens():
    noise = np.asarray(gumbel_noise(keys_at(keys_for(300), jnp.arange(300)), 0, 2 * TILE))
    assert stats.kstest(noise.ravel()[:20_000], "gumbel_r").pvalue > 1e-3
    # Adjacent tokens, and the two tokens of one Threefry call.
    for apart in (1, TILE // 2):
        found = stats.pearsonr(noise[:, :-apart].ravel(), noise[:, apart:].ravel())
        assert abs(found.statistic) < 0.01


def test_the_noise_has_the_tail_probability_of_its_words():
    rng = np.random.default_rng(0)
    powers, most = 2 ** np.arange(32), 2**32 - 1
    near = np.concatenate([np.arange(200), powers, powers - 1, 2**31 + np.arange(-9, 9)])
    words = np.concatenate([near, most - near, rng.integers(0, 2**32, 20_000)])
    partners = rng.integers(0, 2**32, len(words))
    # The tail probability, of which 2^-49 is the smallest at both ends, is exact in float64.
    upper = words < 2**31
    steps = np.where(upper, words, most - words)
    tail = (2 * (steps * 2**16 + partners % 2**16) + 1) * 2.0**-49
    expected = -np.log(-np.where(upper, np.log1p(-tail), np.log(tail)))
    found = noise_of_words(*(jnp.asarray(x, jnp.uint32) for x in (words, partners)))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2e-7, atol=1e-6)
