"""Attention over whole rows against explicit sums, and packed rows against separate rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.model.attention import (
    Bounds,
    FlashAttention,
    Layout,
    PackedAttention,
    attend_causally,
)
from pipeline.compute.model.sharding import make_mesh

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 9, 4, 2, 3


def draw(*, seq: int = SEQ) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(BATCH, seq, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(2 * rng.standard_normal(shape), jnp.float32) for shape in shapes]


def by_hand(q: Any, k: Any, v: Any, *, bounds: Bounds) -> np.ndarray:
    """Reference attention with explicit sums."""
    window, softcap = bounds.window, bounds.softcap
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for row, at, head in np.ndindex(*q.shape[:3]):
        first = 0 if window is None else max(0, at - window + 1)
        group = head // (HEADS // KV_HEADS)
        scores = k[row, first : at + 1, group] @ q[row, at, head]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[row, at, head] = weights / weights.sum() @ v[row, first : at + 1, group]
    return out


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, 1.5), (1, None), (4, 1.5), (SEQ, None), (30, None)]
)
def test_causal_attention_by_hand(window: int | None, softcap: float | None):
    bounds = Bounds(window, softcap)
    found, kept = attend_causally(*draw(), bounds=bounds, cache="kept")
    np.testing.assert_allclose(found, by_hand(*draw(), bounds=bounds), rtol=1e-5, atol=1e-6)
    assert kept == "kept"


def separate(*rows: Sequence[int]) -> Layout:
    """The layout of rows of separate sequences, given each position's segment."""
    segments = np.array(rows)
    starts = np.diff(segments, axis=1, prepend=-1) != 0
    at = np.arange(segments.shape[1])
    positions = at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)
    return Layout(jnp.asarray(positions), jnp.asarray(segments))


# 9 positions: sequences of 4 and 5, then of 2, 6 and 1.
SEPARATE = separate([3, 3, 3, 3, 1, 1, 1, 1, 1], [5, 5, 7, 7, 7, 7, 7, 7, 2])


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, 1.5), (3, None), (4, 1.5), (5, None)]
)
def test_packed_sequences_attend_only_to_themselves(window: int | None, softcap: float | None):
    bounds = Bounds(window, softcap)
    found, kept = PackedAttention(SEPARATE)(*draw(), bounds=bounds, cache="kept")
    for row, (begin, end) in ((0, (0, 4)), (0, (4, 9)), (1, (0, 2)), (1, (2, 8)), (1, (8, 9))):
        alone = [x[:, begin:end] for x in draw()]
        expected = by_hand(*alone, bounds=bounds)[row]
        np.testing.assert_allclose(found[row, begin:end], expected, rtol=1e-5, atol=1e-6)
    assert kept == "kept"


def value_and_gradients(attend: PackedAttention, arrays: list[jax.Array], bounds: Bounds) -> Any:
    real = (attend.layout.segments > 0)[..., None, None]

    def total(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(*arrays, bounds=bounds, cache=None)[0]) * real)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*arrays)


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, expected
    )


@pytest.mark.parametrize(("window", "softcap"), [(None, 1.5), (5, None)])
def test_blocks_of_queries_change_nothing(window: int | None, softcap: float | None):
    seq, bounds = 23, Bounds(window, softcap)
    layout = separate([1] * 9 + [2] * 11 + [0] * 3, [1] * 2 + [2] * 21)
    expected = value_and_gradients(PackedAttention(layout), draw(seq=seq), bounds)
    # Blocks smaller than the window, and larger; none divides the row.
    for block in (4, 8):
        found = value_and_gradients(PackedAttention(layout, block=block), draw(seq=seq), bounds)
        assert_same(found, expected)


def shared(
    *rows: Sequence[tuple[int, Sequence[int]]], total: int
) -> tuple[Layout, list[tuple[int, np.ndarray, int]]]:
    """The layout of rows of groups, and where the sequences are.

    Args:
        rows: groups by row: positions of the prompt without its last token, and of each completion.
        total: length of a row.

    Returns:
        The layout, and for each completion its row, the indices of its whole sequence in the row,
        and the number of those that it does not share with an earlier one.
    """
    arrays = np.zeros((3, len(rows), total), np.int32)
    sequences = []
    for row, groups in enumerate(rows):
        end = segment = 0
        for prompt, news in groups:
            prefix, begin = segment + 1, end
            for number, (first, length) in enumerate([(0, prompt), *((prompt, n) for n in news)]):
                segment, at = segment + 1, np.arange(end, end + length)
                for array, value in zip(arrays, (first + at - end, segment, prefix), strict=True):
                    array[row, at] = np.asarray(value)
                if number:
                    whole = np.concatenate([np.arange(begin, begin + prompt), at])
                    sequences.append((row, whole, len(whole) if number == 1 else length))
                end += length
    positions, segments, prefixes = map(jnp.asarray, arrays)
    return Layout(positions, segments, prefixes), sequences


@pytest.mark.parametrize(("window", "softcap"), [(None, 1.5), (5, None)])
def test_a_shared_prompt_equals_one_for_each_completion(window: int | None, softcap: float | None):
    # A prompt of 6 tokens; one of one token, which has no position before its completions; one that
    # is longer than each window, and a completion that is not.
    layout, sequences = shared(
        [(5, (4, 1, 3)), (0, (2, 3)), (6, (2, 5, 1)), (4, (6, 6))],
        [(9, (6, 2)), (1, (1,)), (3, (4, 6)), (7, (5, 2, 1))],
        total=50,
    )
    bounds, arrays = Bounds(window, softcap), draw(seq=50)

    longest = max(len(at) for _, at, _ in sequences)
    rows = np.array([row for row, _, _ in sequences])
    places = np.array([np.pad(at, (0, longest - len(at))) for _, at, _ in sequences])
    own = np.array(
        [[len(at) - new <= n < len(at) for n in range(longest)] for _, at, new in sequences]
    )

    def alone(*arrays: jax.Array) -> jax.Array:
        """The same sum as `value_and_gradients`, each sequence in its own row."""
        given = [x[rows[:, None], places] for x in arrays]
        encoded, _ = attend_causally(*given, bounds=bounds, cache=None)
        return jnp.sum(jnp.sin(encoded) * own[..., None, None])

    expected = jax.jit(jax.value_and_grad(alone, argnums=(0, 1, 2)))(*arrays)
    # The whole row at once; blocks shorter than a prompt, which do not divide the row.
    for block in (50, 6):
        attend = PackedAttention(layout, block=block, prompt=9, completion=6)
        assert_same(value_and_gradients(attend, arrays, bounds), expected)


@pytest.mark.parametrize(
    ("share", "kv_heads", "mesh", "window", "softcap"),
    [
        (False, 1, (1, 2), 100, None),
        (True, 2, (2, 2), 100, 2.0),
    ],
)
def test_the_kernel_equals_blockwise_attention(share, kv_heads, mesh, window, softcap):
    rows, seq, heads, head_dim = 4, 300 if share else 200, 4, 128
    fsdp, tp = mesh
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(0.3 * rng.standard_normal((rows, seq, n, head_dim)), jnp.float32)
        for n in (heads, kv_heads, kv_heads)
    ]
    if share:
        # Three blocks of the kernel. At the end of the second completion the window has left the
        # prompt, so the last queries see no key of the first block.
        layout, _ = shared(*[[(120, (20, 130)), (0, (1, 9))]] * rows, total=seq)
    else:
        layout = separate(*[[1] * 60 + [2] * 120 + [0] * 20] * rows)
    flash = FlashAttention(make_mesh(jax.devices()[:4], fsdp=fsdp, tp=tp), interpret=True)
    bounds = Bounds(window, softcap)
    found = value_and_gradients(PackedAttention(layout, flash=flash), arrays, bounds)
    plain = PackedAttention(layout, prompt=120, completion=130)
    assert_same(found, value_and_gradients(plain, arrays, bounds))
