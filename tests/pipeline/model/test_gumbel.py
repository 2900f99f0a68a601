"""The noise of tokens: a function of names and ids, whatever the stretch, and Gumbel's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pipeline.model.gumbel import TILE, gumbel_noise, keys_at


def keys_for(rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (rows, 2), np.uint32))


def test_invariant_2_noise_is_a_function_of_key_position_and_token_alone():
    keys, positions = keys_for(4), jnp.array([0, 5, 0, 5])
    noise = np.asarray(gumbel_noise(keys_at(keys, positions), 0, 33))
    alone = np.asarray(gumbel_noise(keys_at(keys[2:3], positions[2:3]), 0, 33))
    np.testing.assert_array_equal(noise[2:3], alone)
    mixed = np.asarray(gumbel_noise(keys_at(keys[::-1], positions[::-1]), 0, 33))
    np.testing.assert_array_equal(noise, mixed[::-1])
    other = np.asarray(gumbel_noise(keys_at(keys, positions + 1), 0, 33))
    assert (noise != other).all(axis=1).all()
    assert len(np.unique(noise)) == noise.size


@pytest.mark.parametrize("stretch", [(0, 1), (3, 400), (127, 2), (255, 258), (511, 513)])
def test_any_stretch_has_the_noise_of_its_tokens(stretch: tuple[int, int]):
    first, size = stretch
    whole = np.asarray(gumbel_noise(keys_for(3), 0, 4 * TILE))
    part = np.asarray(gumbel_noise(keys_for(3), jnp.int32(first), size))
    np.testing.assert_array_equal(part, whole[:, first : first + size])


def test_half_the_work_where_stretches_are_aligned():
    for first, size in ((0, 4 * TILE), (TILE, TILE), (3 * TILE, 2 * TILE)):
        one, other = (
            np.asarray(gumbel_noise(keys_for(3), jnp.int32(first), size, aligned=aligned))
            for aligned in (True, False)
        )
        np.testing.assert_array_equal(one, other)


def test_the_noise_is_gumbels_and_tokens_are_independent():
    noise = np.asarray(gumbel_noise(keys_at(keys_for(300), jnp.arange(300)), 0, 2 * TILE))
    assert stats.kstest(noise.ravel()[:20_000], "gumbel_r").pvalue > 1e-3
    # Of neighbours, and of the two that one call of Threefry gives.
    for apart in (1, TILE // 2):
        found = stats.pearsonr(noise[:, :-apart].ravel(), noise[:, apart:].ravel())
        assert abs(found.statistic) < 0.01
