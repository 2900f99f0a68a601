"""Ring caches against rings that are filled one position at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.decode.cache import (
    PromptAttention,
    flush,
)
from pipeline.compute.model.attention import Bounds

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 3


def test_int8_codes_are_within_half_a_scale_of_the_values():
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 2, 5, KV_HEADS, HEAD_DIM)).astype(np.float32)
    key[0, 1, 0] = 0.0
    prefill = PromptAttention(jnp.array([5, 5]), 5, eight_bits=True)
    query = jnp.ones((2, 5, HEADS, HEAD_DIM))
    given = jnp.asarray(key), jnp.asarray(value)
    _, cache = prefill(query, *given, bounds=Bounds(None, None), cache=None)
    keys, values, key_scales, value_scales = map(np.asarray, cache)
    assert keys.dtype == values.dtype == np.int8
    assert key_scales.shape == (2, KV_HEADS, 5)
    key, value = (x.swapaxes(1, 2) for x in (key, value))
    for codes, scales, exact in ((keys, key_scales, key), (values, value_scales, value)):
        scale = scales[..., None]
        error = np.abs(codes * scale - exact)
        assert (error <= 0.5001 * scale).all()
        assert error.max() > 0.1 * scale.max()
    assert (np.abs(keys).max(axis=-1)[key.any(axis=-1)] == 127).all()
    assert not keys[0, 0, 1].any()


@pytest.mark.parametrize(("slots", "steps"), [(12, 4), (10, 4), (7, 3), (6, 6), (4, 9), (1, 2)])
def test_flush_equals_writing_one_position_at_a_time(slots: int, steps: int):
    rng = np.random.default_rng(0)
    rows = 16
    ring = rng.integers(0, 99, (rows, KV_HEADS, slots, HEAD_DIM)).astype(np.float32)
    recent = rng.integers(100, 199, (rows, KV_HEADS, steps, HEAD_DIM)).astype(np.float32)
    start = rng.integers(0, 3 * slots, rows).astype(np.int32)
    new = rng.integers(0, steps + 1, rows).astype(np.int32)
    expected = ring.copy()
    for row in range(rows):
        for step in range(new[row]):
            expected[row, :, (start[row] + step) % slots] = recent[row, :, step]
    lengths = jnp.asarray(start + new)
    rings, recents = ([(jnp.asarray(x),)] for x in (ring, recent))
    ((found,),) = flush(rings, recents, jnp.asarray(start), lengths)
    np.testing.assert_array_equal(found, expected)
