"""Ring caches against rings that are filled one position at a time."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decode.cache import (
    PromptAttention,
    TokenAttention,
    bytes_per_row,
    capacity,
    held_positions,
    seen,
)
from pipeline.model.architecture import architecture
from pipeline.model.attention import attend_causally
from tests import tiny

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 3


def ring(positions: int, slots: int) -> list[int]:
    """What a ring holds after so many positions were written to it, -1 for nothing."""
    held = [-1] * slots
    for position in range(positions):
        held[position % slots] = position
    return held


@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(1, 20))
def test_held_positions_are_those_of_a_ring(lengths: list[int], slots: int):
    found = np.asarray(held_positions(jnp.asarray(lengths), slots))
    expected = np.array([ring(length, slots) for length in lengths])
    np.testing.assert_array_equal(np.maximum(found, -1), expected)
    following = np.asarray(seen(jnp.asarray(lengths), slots=slots))
    after = np.array([ring(length + 1, slots) for length in lengths])
    np.testing.assert_array_equal(following, after >= 0)


def test_held_positions_by_hand():
    found = held_positions(jnp.array([0, 2, 4, 9]), 4)
    np.testing.assert_array_equal(
        np.asarray(found)[1:].tolist(),
        [
            [0, 1, -2, -1],
            [0, 1, 2, 3],
            [8, 5, 6, 7],
        ],
    )
    assert (np.asarray(found)[0] < 0).all()


@pytest.mark.parametrize(
    ("window", "longest", "slots"), [(None, 40, 40), (8, 40, 8), (8, 5, 5), (8, 8, 8)]
)
def test_a_ring_is_as_long_as_will_be_seen(window: int | None, longest: int, slots: int):
    assert capacity(window=window, max_tokens=longest) == slots


def test_bytes_are_counted_by_hand():
    # Keys and values, 2 kv heads of 8, 4 bytes; 6 local layers of 8 slots, a global one of 40.
    found = bytes_per_row(tiny.policy().architecture, max_tokens=40)
    assert found == 2 * 2 * 8 * 4 * (6 * 8 + 40)
    # A byte each, and a float32 for each of the 2 kv heads.
    found = bytes_per_row(tiny.policy().architecture, max_tokens=40, eight_bits=True)
    assert found == 2 * 2 * (8 + 4) * (6 * 8 + 40)


def to_255_steps(x: np.ndarray) -> np.ndarray:
    """Each vector rounded to 127 steps up to its largest number, and as many down."""
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.rint(x / step) * step


def test_eight_bits_hold_a_vector_to_half_a_step():
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 2, 5, KV_HEADS, HEAD_DIM)).astype(np.float32)
    key[0, 1, 0] = 0.0
    prefill = PromptAttention(jnp.array([5, 5]), 5, eight_bits=True)
    query = jnp.ones((2, 5, HEADS, HEAD_DIM))
    _, cache = prefill(
        query, jnp.asarray(key), jnp.asarray(value), window=None, softcap=None, cache=None
    )
    keys, values, key_scales, value_scales = map(np.asarray, cache)
    assert keys.dtype == values.dtype == np.int8
    assert key_scales.shape == (2, 5, KV_HEADS, 1)
    for steps, scale, exact in ((keys, key_scales, key), (values, value_scales, value)):
        error = np.abs(steps * scale - exact)
        assert (error <= 0.5001 * scale).all()
        assert error.max() > 0.1 * scale.max()
    assert (np.abs(keys).max(axis=-1)[key.any(axis=-1)] == 127).all()
    assert not keys[0, 1, 0].any()


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("prompts", [(1, 3, 7), (12, 5, 11)])
def test_attention_over_rings_is_attention_over_everything(
    window: int | None, prompts: tuple[int, ...], softcap: float | None, eight_bits: bool
):
    total, bucket = 20, 12
    rng = np.random.default_rng(0)

    def draw(heads: int) -> jnp.ndarray:
        shape = (len(prompts), total, heads, HEAD_DIM)
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    query, key, value = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    if eight_bits:  # what rings hold exactly
        key, value = (jnp.asarray(to_255_steps(np.asarray(x))) for x in (key, value))
    kind: Any = {"window": window, "softcap": softcap}
    expected, _ = attend_causally(query, key, value, **kind, cache=None)

    lengths = jnp.asarray(prompts)
    # Nothing of the padding may get into the rings.
    real = (jnp.arange(bucket) < lengths[:, None])[..., None, None]
    padded = [jnp.where(real, x[:, :bucket], jnp.nan) for x in (key, value)]
    prefill = PromptAttention(lengths, total, eight_bits)
    _, cache = prefill(query[:, :bucket], *padded, **kind, cache=None)
    assert len(cache) == (4 if eight_bits else 2)
    assert all(np.isfinite(x).all() for x in cache if window is not None and window <= min(prompts))
    assert cache[0].shape[1] == capacity(window=window, max_tokens=total)
    # Rings hold finite numbers only.
    cache = tuple(jnp.nan_to_num(x, nan=1e6) if x.dtype != jnp.int8 else x for x in cache)

    rows = jnp.arange(len(prompts))
    for step in range(total - max(prompts)):
        at = lengths + step
        new = (x[rows, at][:, None] for x in (query, key, value))
        found, cache = TokenAttention(at)(*new, **kind, cache=cache)
        np.testing.assert_allclose(found[:, 0], expected[rows, at], rtol=1e-5, atol=1e-6)


def test_a_row_writes_to_its_own_slot_only():
    cache = (jnp.zeros((2, 4, KV_HEADS, HEAD_DIM)),) * 2
    one = jnp.ones((2, 1, KV_HEADS, HEAD_DIM))
    query = jnp.ones((2, 1, HEADS, HEAD_DIM))
    attend = TokenAttention(jnp.array([1, 6]))
    _, (keys, values) = attend(query, one, 2 * one, window=4, softcap=None, cache=cache)
    written = np.array([[0, 1, 0, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(keys[..., 0, 0], written)
    np.testing.assert_array_equal(values[..., 0, 0], 2 * written)


def test_bytes_of_gemma_2_are_counted_by_hand():
    # As above, but every second layer is local: 4 local ones and 3 global ones.
    shape = architecture(tiny.hf_config(**tiny.GEMMA2), dtype=jnp.dtype("float32"))
    assert bytes_per_row(shape, max_tokens=40) == 2 * 2 * 8 * 4 * (4 * 8 + 3 * 40)
