"""Attention: the interface `Attend`, and attention over whole and packed sequences.

Decoding attends over ring caches instead (see decode/cache.py). Scores may be soft-capped as in
Gemma 2 (arXiv:2408.00118): cap * tanh(score / cap), before the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline.compute.model.flash import FlashAttention

LayerCache = Any
"""An `Attend`'s cache of one layer, opaque to the model."""

MASKED = -1e30
"""Score of a masked position; finite, so that no gradient becomes NaN."""


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer, with a cache.

    Queries are already scaled. `window` is the number of positions that a query attends to, itself
    included (None: all), `softcap` the bound of the scores (None: no soft cap). Returns the encoded
    values and the layer's new cache.
    """

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        *,
        window: int | None,
        softcap: float | None,
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], LayerCache]:
        """Attends and updates the cache; see the class."""


def soft_cap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """`x` bounded smoothly to [-cap, cap]; unchanged for None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend_where(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch slots kv_heads head_dim"],
    value: Float[Array, "batch slots kv_heads head_dim"],
    *,
    visible: Bool[Array, "#batch #seq slots"],
    softcap: float | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """softmax(capped scores of the visible keys) x values, the softmax in float32.

    Each kv head serves heads / kv_heads adjacent query heads.
    """
    if softcap is None:
        mask = jnp.broadcast_to(visible, (query.shape[0], query.shape[1], key.shape[1]))[:, None]
        return jax.nn.dot_product_attention(query, key, value, scale=1.0, mask=mask)
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], soft_cap(scores, softcap), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)


def attend_causally(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    *,
    window: int | None,
    softcap: float | None,
    cache: LayerCache,
) -> tuple[Float[Array, "batch seq heads head_dim"], LayerCache]:
    """Causal attention; returns `cache` unchanged.

    Rows are left-aligned, so the padding at the end of a row is invisible to its real positions.
    """
    if softcap is not None:
        causal = _causal(query.shape[1], window=window)[None]
        return attend_where(query, key, value, visible=causal, softcap=softcap), cache
    reach = None if window is None or window >= query.shape[1] else (window - 1, 0)
    encoded = jax.nn.dot_product_attention(
        query, key, value, scale=1.0, is_causal=True, local_window_size=reach
    )
    return encoded, cache


@partial(jax.tree_util.register_dataclass, data_fields=["segments"], meta_fields=["block", "flash"])
@dataclass(frozen=True)
class PackedAttention:
    """`Attend` for rows of packed sequences.

    A position attends to itself and to earlier positions of its own sequence, at most `window` in
    all, so that a packed sequence is computed as if it had its own row. RoPE positions must start
    at 0 for each sequence.

    Scores exist for one block of queries at a time, forward and backward; with a window, only
    against the keys that are visible from the block. If the row is one block, a layer with a window
    computes bands of queries in parallel, each as long as the window.

    Attributes:
        segments: number of the sequence of each position; equal numbers are contiguous.
        block: queries whose scores exist at a time.
        flash: the kernel to use, which never writes scores; None: plain XLA.
    """

    segments: Int[Array, "*parts seq"]
    block: int = 512
    flash: FlashAttention | None = None

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        *,
        window: int | None,
        softcap: float | None,
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], LayerCache]:
        """See `Attend`; returns `cache` unchanged."""
        if self.flash is not None:
            run = partial(self.flash, segments=self.segments, window=window, softcap=softcap)
            return run(query, key, value), cache
        seq = query.shape[1]
        if seq <= self.block and window is not None and 2 * window < seq:
            return self._in_bands(query, key, value, window=window, softcap=softcap), cache
        if seq <= self.block:
            at, of = jnp.arange(seq), jnp.arange(seq)
            visible = _visible(self.segments, self.segments, at, of, window)
            return attend_where(query, key, value, visible=visible, softcap=softcap), cache
        count = -(-seq // self.block)
        span = count * self.block if window is None else self.block + window - 1
        # Padding before the row, in place of the keys before the first block.
        front = 0 if window is None else window - 1
        behind = count * self.block - seq

        def pad(x: Array, front: int) -> Array:
            return jnp.pad(x, ((0, 0), (front, behind), *((0, 0) for _ in x.shape[2:])))

        queries, query_segments = pad(query, 0), pad(self.segments, 0)
        keys, values, key_segments = (pad(x, front) for x in (key, value, self.segments))

        @jax.checkpoint
        def one(number: Int[Array, ""]) -> Float[Array, "batch block heads head_dim"]:
            first = number * self.block
            start = first if window is not None else 0
            mine = partial(
                jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=self.block, axis=1
            )
            theirs = partial(
                jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=span, axis=1
            )
            visible = _visible(
                mine(query_segments),
                theirs(key_segments),
                first + jnp.arange(self.block),
                start - front + jnp.arange(span),
                window,
            )
            return attend_where(
                mine(queries), theirs(keys), theirs(values), visible=visible, softcap=softcap
            )

        blocks = jax.lax.map(one, jnp.arange(count))
        encoded = jnp.moveaxis(blocks, 0, 1).reshape(queries.shape)
        return encoded[:, :seq], cache

    def _in_bands(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        *,
        window: int,
        softcap: float | None,
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Bands of `window` queries against their own keys and the `window` keys before.

        Computes 2 x window x seq scores.
        """
        batch, seq = self.segments.shape
        count = -(-seq // window)

        def bands(x: Array) -> Array:
            behind = ((0, 0), (0, count * window - seq), *((0, 0) for _ in x.shape[2:]))
            return jnp.pad(x, behind).reshape(batch, count, window, *x.shape[2:])

        def with_previous(x: Array) -> Array:
            own = bands(x)
            before = jnp.pad(own[:, :-1], ((0, 0), (1, 0), *((0, 0) for _ in own.shape[2:])))
            return jnp.concatenate([before, own], axis=2)

        def one(
            query: Array, key: Array, value: Array, mine: Array, theirs: Array, first: Array
        ) -> Array:
            at, of = first + jnp.arange(window), first + jnp.arange(-window, window)
            visible = _visible(mine, theirs, at, of, window)
            return attend_where(query, key, value, visible=visible, softcap=softcap)

        encoded = jax.vmap(one, in_axes=(1, 1, 1, 1, 1, 0), out_axes=1)(
            bands(query),
            with_previous(key),
            with_previous(value),
            bands(self.segments),
            with_previous(self.segments),
            jnp.arange(count) * window,
        )
        return encoded.reshape(batch, count * window, *query.shape[2:])[:, :seq]


def _visible(
    query_segments: Int[Array, "batch seq"],
    key_segments: Int[Array, "batch slots"],
    at: Int[Array, " seq"],
    of: Int[Array, " slots"],
    window: int | None,
) -> Bool[Array, "batch seq slots"]:
    """True where a query attends to a key, given their indices in the row."""
    behind = at[:, None] - of[None, :]
    near = (behind >= 0) & (of >= 0)
    if window is not None:
        near &= behind < window
    return near & (query_segments[:, :, None] == key_segments[:, None, :])


def _causal(seq: int, *, window: int | None) -> Bool[Array, "seq seq"]:
    """True where a position (first axis) attends to another one (second axis)."""
    behind = jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :]
    return (behind >= 0) & (behind < (seq if window is None else window))
