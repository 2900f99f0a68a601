"""Attention over whole and packed rows against plain attention with the whole mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

HEADS = 4
Group = tuple[int, Sequence[int]]
"""Positions of a prompt without its last token, and of each of its completions."""


def packed(*rows: Sequence[Group], total: int) -> Layout:
    """The layout of rows of groups; completions of one group share their prompt."""
    arrays = np.zeros((3, len(rows), total), np.int32)
    for row, groups in enumerate(rows):
        end = segment = 0
        for prompt, news in groups:
            prefix = segment + 1
            for first, length in ((0, prompt), *((prompt, new) for new in news)):
                segment, at = segment + 1, np.arange(end, end + length)
                for array, value in zip(arrays, (first + at - end, segment, prefix), strict=True):
                    array[row, at] = np.asarray(value)
                end += length
    return Layout(*map(jnp.asarray, arrays))


def separate(*rows: Sequence[int], total: int) -> Layout:
    """The layout of rows of sequences, given their lengths."""
    layout = packed(*[[(0, [length]) for length in row] for row in rows], total=total)
    return Layout(layout.positions, layout.segments)


def plain(layout: Layout, q: Any, k: Any, v: Any, *, bounds: Bounds) -> jax.Array:
    """Attention with all scores: of a token to earlier ones of its sequence and of its prompt."""
    positions, segments = np.asarray(layout.positions), np.asarray(layout.segments)
    prefixes = segments if layout.prefixes is None else np.asarray(layout.prefixes)
    keys = segments[:, None, :]
    visible = (keys == segments[:, :, None]) | (keys == prefixes[:, :, None])
    visible &= np.tri(layout.segments.shape[1], dtype=bool)
    if bounds.window is not None:
        visible &= positions[:, :, None] - positions[:, None, :] < bounds.window
    k, v = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if bounds.softcap is not None:
        scores = bounds.softcap * jnp.tanh(scores / bounds.softcap)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def draw(layout: Layout, *, kv_heads: int = 2, head_dim: int = 3, scale: float = 2.0) -> Any:
    """Random queries, keys and values."""
    rng = np.random.default_rng(0)
    shapes = [(*layout.segments.shape, heads, head_dim) for heads in (HEADS, kv_heads, kv_heads)]
    return [jnp.asarray(scale * rng.standard_normal(shape), jnp.float32) for shape in shapes]


def values_and_gradients(attend: Callable[..., jax.Array], layout: Layout, arrays: Any) -> Any:
    """Encoded values, 0 where there is padding, and the gradient of a sum of them."""
    real = (layout.segments > 0)[..., None, None]

    def total(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        encoded = attend(*arrays) * real
        return jnp.sum(jnp.sin(encoded)), encoded

    grads, encoded = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return encoded, grads


def check(
    attend: Any, layout: Layout, bounds: Bounds, arrays: Any, *, rtol: float = 1e-5, atol: float
) -> None:
    """Compares with `plain`: values within these tolerances, and gradients."""

    def ours(*arrays: jax.Array) -> jax.Array:
        encoded, kept = attend(*arrays, bounds=bounds, cache="kept")
        assert kept == "kept"
        return encoded

    found, grads = values_and_gradients(ours, layout, arrays)
    expected, wanted = values_and_gradients(
        lambda *arrays: plain(layout, *arrays, bounds=bounds), layout, arrays
    )
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)
    for one, other in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("bounds", [Bounds(None, 1.5), Bounds(1, None), Bounds(30, None)])
def test_causal_attention(bounds: Bounds):
    layout = separate([9], [9], total=9)
    check(attend_causally, layout, bounds, draw(layout), atol=1e-6)


@pytest.mark.parametrize("bounds", [Bounds(None, 1.5), Bounds(1, 1.5), Bounds(5, None)])
def test_packed_sequences_attend_only_to_themselves_in_any_blocks(bounds: Bounds):
    layout = separate([9, 11], [2, 21], total=23)
    # The whole row at once; blocks smaller than the window, and larger; none divides the row.
    for block in (512, 4, 8):
        attend = PackedAttention(layout, block=block)
        check(attend, layout, bounds, draw(layout), atol=1e-6)


@pytest.mark.parametrize("bounds", [Bounds(None, 1.5), Bounds(5, None)])
def test_a_shared_prompt_equals_one_for_each_completion(bounds: Bounds):
    # A prompt of 6 tokens; one of one token, which has no position before its completions; one that
    # is longer than each window, and a completion that is not.
    layout = packed(
        [(5, (4, 1, 3)), (0, (2, 3)), (6, (2, 5, 1)), (4, (6, 6))],
        [(9, (6, 2)), (1, (1,)), (3, (4, 6)), (7, (5, 2, 1))],
        total=50,
    )
    # The whole row at once; blocks shorter than a prompt, which do not divide the row.
    for block in (50, 6):
        attend = PackedAttention(layout, block=block, prompt=9, completion=6)
        check(attend, layout, bounds, draw(layout), atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "kv_heads", "mesh", "softcap"),
    [
        (separate(*[[60, 120]] * 4, total=200), 1, (1, 2), None),
        # Three blocks of the kernel. At the end of the second completion the window has left the
        # prompt, so the last queries see no key of the first block.
        (packed(*[[(120, (20, 130)), (0, (1, 9))]] * 4, total=300), 2, (2, 2), 2.0),
    ],
    ids=["separate", "shared"],
)
def test_the_kernel_equals_plain_attention(layout, kv_heads, mesh, softcap):
    fsdp, tp = mesh
    flash = FlashAttention(make_mesh(jax.devices()[:4], fsdp=fsdp, tp=tp), interpret=True)
    arrays = draw(layout, kv_heads=kv_heads, head_dim=128, scale=0.3)
    attend = PackedAttention(layout, flash=flash)
    check(attend, layout, Bounds(100, softcap), arrays, rtol=1e-4, atol=2e-5)
