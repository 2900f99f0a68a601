"""What a position attends to: the interface, and attention over whole sequences.

Decoding attends over rings instead (see decode/cache.py). Scores may be soft-capped, as Gemma 2
does it (arXiv:2408.00118): cap * tanh(score / cap), before anything is masked.
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
"""What an `Attend` keeps for one layer; the model passes it through without looking inside."""

UNSEEN = -1e30
"""Score of a position that is not seen; finite, so that no gradient becomes NaN."""


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer over whatever the caller keeps.

    Queries are scaled already. `window` is the number of positions a query sees, itself included
    (None: all of them), `softcap` the bound of the scores (None: they have none). Returns the
    encoded values and what to keep for this layer.
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
        """Attends and keeps; see the class."""


def soft_cap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """`x` drawn smoothly into [-cap, cap]; None leaves it as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend_where(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch slots kv_heads head_dim"],
    value: Float[Array, "batch slots kv_heads head_dim"],
    *,
    seen: Bool[Array, "#batch #seq slots"],
    softcap: float | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """softmax(capped scores of the keys that are seen) x values, the softmax in float32.

    Each kv head serves heads / kv_heads query heads that stand together.
    """
    if softcap is None:
        mask = jnp.broadcast_to(seen, (query.shape[0], query.shape[1], key.shape[1]))[:, None]
        return jax.nn.dot_product_attention(query, key, value, scale=1.0, mask=mask)
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], soft_cap(scores, softcap), UNSEEN)
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
    """Every position sees itself and the ones before it; the cache is passed through untouched.

    Rows are left-aligned, so the padding behind a row's end is invisible to its real positions.
    """
    if softcap is not None:
        causal = _causal(query.shape[1], window=window)[None]
        return attend_where(query, key, value, seen=causal, softcap=softcap), cache
    reach = None if window is None or window >= query.shape[1] else (window - 1, 0)
    encoded = jax.nn.dot_product_attention(
        query, key, value, scale=1.0, is_causal=True, local_window_size=reach
    )
    return encoded, cache


@partial(jax.tree_util.register_dataclass, data_fields=["segments"], meta_fields=["block", "flash"])
@dataclass(frozen=True)
class PackedAttention:
    """`Attend` for rows in which several sequences stand behind one another.

    A position sees the earlier ones of its own sequence and itself, of those at most `window`, so
    that a packed sequence is computed as if it had the row to itself. Positions for RoPE have to
    begin anew with each sequence.

    Scores exist for one block of queries at a time, forward and backward, and in a layer with a
    window only against the keys that some query of the block can see. In a row that is one block,
    a layer with a window computes bands of queries side by side, each as long as the window.

    Attributes:
        segments: number of the sequence that each position belongs to; equal numbers in a row
            stand together.
        block: queries whose scores exist at a time.
        flash: compute in a kernel that never writes scores, instead; None: it is plain XLA.
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
        """See `Attend`; the cache is passed through untouched."""
        if self.flash is not None:
            run = partial(self.flash, segments=self.segments, window=window, softcap=softcap)
            return run(query, key, value), cache
        seq = query.shape[1]
        if seq <= self.block and window is not None and 2 * window < seq:
            return self._in_bands(query, key, value, window=window, softcap=softcap), cache
        if seq <= self.block:
            seen = _seen(self.segments, self.segments, jnp.arange(seq), jnp.arange(seq), window)
            return attend_where(query, key, value, seen=seen, softcap=softcap), cache
        count = -(-seq // self.block)
        span = count * self.block if window is None else self.block + window - 1
        # In front of the row stand keys that the first block's queries could see, were there any.
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
            seen = _seen(
                mine(query_segments),
                theirs(key_segments),
                first + jnp.arange(self.block),
                start - front + jnp.arange(span),
                window,
            )
            return attend_where(
                mine(queries), theirs(keys), theirs(values), seen=seen, softcap=softcap
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
        """`window` queries each against their own keys and as many before: 2 window seq scores."""
        batch, seq = self.segments.shape
        count = -(-seq // window)

        def bands(x: Array) -> Array:
            behind = ((0, 0), (0, count * window - seq), *((0, 0) for _ in x.shape[2:]))
            return jnp.pad(x, behind).reshape(batch, count, window, *x.shape[2:])

        def with_those_before(x: Array) -> Array:
            own = bands(x)
            before = jnp.pad(own[:, :-1], ((0, 0), (1, 0), *((0, 0) for _ in own.shape[2:])))
            return jnp.concatenate([before, own], axis=2)

        def one(
            query: Array, key: Array, value: Array, mine: Array, theirs: Array, first: Array
        ) -> Array:
            at, of = first + jnp.arange(window), first + jnp.arange(-window, window)
            seen = _seen(mine, theirs, at, of, window)
            return attend_where(query, key, value, seen=seen, softcap=softcap)

        encoded = jax.vmap(one, in_axes=(1, 1, 1, 1, 1, 0), out_axes=1)(
            bands(query),
            with_those_before(key),
            with_those_before(value),
            bands(self.segments),
            with_those_before(self.segments),
            jnp.arange(count) * window,
        )
        return encoded.reshape(batch, count * window, *query.shape[2:])[:, :seq]


def _seen(
    query_segments: Int[Array, "batch seq"],
    key_segments: Int[Array, "batch slots"],
    at: Int[Array, " seq"],
    of: Int[Array, " slots"],
    window: int | None,
) -> Bool[Array, "batch seq slots"]:
    """Which keys each query sees, given their places in the row."""
    behind = at[:, None] - of[None, :]
    near = (behind >= 0) & (of >= 0)
    if window is not None:
        near &= behind < window
    return near & (query_segments[:, :, None] == key_segments[:, None, :])


def _causal(seq: int, *, window: int | None) -> Bool[Array, "seq seq"]:
    """Which positions (second axis) each position (first axis) sees in a row of its own."""
    behind = jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :]
    return (behind >= 0) & (behind < (seq if window is None else window))
