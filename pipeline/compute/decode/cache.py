"""KV caches: one ring per layer, window-sized for local layers, row-sized for global ones.

A layer that attends to the keys and values of an earlier layer reads its ring and has none.

Slot `s` of a ring of capacity C holds the last position p < n with p = s (mod C), where n is the
number of positions that the row has written. A row's length determines the position in each slot,
so no array of positions and no mask is stored. A prompt longer than a ring leaves its last C
positions in it.

While a segment is decoded, rings are only read. Rows are at different positions, and a TPU would
write one row after another at each step; so new positions go to `recent` rings, in which step i of
the segment is slot i for every row, and `flush` copies them to the ring when the segment ends.

A ring may be stored in 8 bits: each key and each value vector as int8 codes with a scale of its
own, the largest magnitude being code 127. The products use the codes; a key's scale multiplies its
score and a value's scale its weight, so no dequantized ring is written to memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Shaped

from pipeline.compute.model.architecture import Architecture
from pipeline.compute.model.attention import (
    MASKED,
    Bounds,
    Keys,
    Queries,
    attend_causally,
    soft_cap,
)

RingCache = tuple[Shaped[Array, "batch kv_heads ..."], ...]
"""Keys and values of one layer, `batch kv_heads slots head_dim`; in 8 bits their codes, then their
scales, `batch kv_heads slots`.

The positions of a kv head are contiguous: with heads as the last but one axis a TPU would take
twice the bytes for one kv head, as in Gemma 3 1b, and copy every ring."""

Caches = Sequence[RingCache]
"""One ring cache per layer that has keys and values."""

_LARGEST_CODE = 127


def capacity(*, window: int | None, max_tokens: int) -> int:
    """Slots of a layer's ring for a row of at most `max_tokens` positions."""
    return max_tokens if window is None else min(window, max_tokens)


def ring_slots(architecture: Architecture, *, max_tokens: int) -> list[int]:
    """`capacity` of each ring."""
    layers = architecture.shape.kv_layers
    return [capacity(window=architecture.window(n), max_tokens=max_tokens) for n in layers]


def empty_rings(
    architecture: Architecture, *, rows: int, slots: Iterable[int], eight_bits: bool
) -> tuple[RingCache, ...]:
    """Zero-filled rings for `rows` rows, given the slots of each ring."""
    shape, dtype = architecture.shape, architecture.config.param_dtype

    def ring(layer: int, slots: int) -> RingCache:
        zeros = jnp.zeros((rows, shape.kv_heads, slots, shape.head_dim_of(layer)), dtype)
        return _stored(zeros, zeros, eight_bits=eight_bits)

    return tuple(map(ring, shape.kv_layers, slots))


def _stored(
    key: Float[Array, "batch kv_heads slots head_dim"],
    value: Float[Array, "batch kv_heads slots head_dim"],
    *,
    eight_bits: bool,
) -> RingCache:
    if not eight_bits:
        return key, value
    keys, key_scales = _quantize(key)
    values, value_scales = _quantize(value)
    return keys, values, key_scales, value_scales


def _quantize(
    x: Float[Array, "batch kv_heads slots head_dim"],
) -> tuple[Int8[Array, "batch kv_heads slots head_dim"], Float[Array, "batch kv_heads slots"]]:
    """Int8 codes from -127 to 127, and the scale of each vector."""
    exact = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(exact), axis=-1) / _LARGEST_CODE
    codes = jnp.round(exact / jnp.where(scale > 0, scale, 1.0)[..., None])
    return codes.astype(jnp.int8), scale


def held_positions(lengths: Int[Array, " batch"], slots: int) -> Int[Array, "batch slots"]:
    """Position held by each slot of a ring after `lengths` positions; negative if empty."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)[None, :]) % slots


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lengths"],
    meta_fields=["max_tokens", "eight_bits"],
)
@dataclass(frozen=True)
class PromptAttention:
    """`Attend` for prefill: causal attention; returns the filled ring.

    Attributes:
        lengths: real tokens of each row; padding never enters a ring.
        max_tokens: maximum positions of a row of the rings.
        eight_bits: whether rings are stored in 8 bits.
    """

    lengths: Int[Array, " batch"]
    max_tokens: int
    eight_bits: bool = False

    def __call__(
        self, query: Queries, key: Keys, value: Keys, *, bounds: Bounds, cache: Any
    ) -> tuple[Queries, RingCache]:
        """See `Attend`; returns no ring for shared keys and values."""
        encoded, _ = attend_causally(query, key, value, bounds=bounds, cache=cache)
        if bounds.shared:
            return encoded, ()
        slots = capacity(window=bounds.window, max_tokens=self.max_tokens)
        source = jnp.clip(held_positions(self.lengths, slots), 0, key.shape[1] - 1)

        def ring(x: Keys) -> jax.Array:
            return jnp.take_along_axis(_by_head(x), source[:, None, :, None], axis=2)

        return encoded, _stored(ring(key), ring(value), eight_bits=self.eight_bits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenAttention:
    """`Attend` for decoding: one new position per row, attending to a ring and a recent ring.

    A layer's cache is its ring and its recent ring; the updated recent ring is returned. Shared
    keys and values are read from the rings of their layer, which already have the new position.

    Attributes:
        start: positions in each row's ring.
        positions: position of each row's new token; rows may be at different positions.
        step: slot of the new position in the recent rings, the same for all rows.
    """

    start: Int[Array, " batch"]
    positions: Int[Array, " batch"]
    step: Int[Array, ""]

    def __call__(
        self,
        query: Queries,
        key: Keys,
        value: Keys,
        *,
        bounds: Bounds,
        cache: Any,
    ) -> tuple[Queries, RingCache]:
        """See `Attend`."""
        if bounds.shared:
            (ring, _), recent = cache
        else:
            ring, recent = cache
            new = _stored(_by_head(key), _by_head(value), eight_bits=len(ring) > 2)
            recent = tuple(
                jax.lax.dynamic_update_slice_in_dim(slots, x, self.step, axis=2)
                for slots, x in zip(recent, new, strict=True)
            )
        held = (
            held_positions(self.start, ring[0].shape[2]),
            self.start[:, None] + jnp.arange(recent[0].shape[2]),
        )
        visible = [visible_slots(x, self.positions, window=bounds.window) for x in held]
        return _attend(query, cache=(ring, recent), visible=visible, softcap=bounds.softcap), recent


def visible_slots(
    held: Int[Array, "batch slots"], positions: Int[Array, " batch"], *, window: int | None
) -> Bool[Array, "batch slots"]:
    """Slots that a query at `positions` attends to, its own included, given their positions."""
    behind = positions[:, None] - held
    visible = (held >= 0) & (behind >= 0)
    return visible if window is None else visible & (behind < window)


def flush(
    rings: Caches,
    recent: Caches,
    start: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Caches:
    """The rings with positions `start` to `lengths - 1` copied from the recent rings."""
    flushed: list[RingCache] = []
    for ring, recent_ring in zip(rings, recent, strict=True):
        # One layer after another, so that the copies of one layer exist at a time.
        new, _ = jax.lax.optimization_barrier((recent_ring, flushed[-1:]))
        flushed.append(_flush_layer(ring, new, start, lengths))
    return tuple(flushed)


def _flush_layer(
    ring: RingCache,
    recent: RingCache,
    start: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> RingCache:
    """The ring with the new positions, which are in one or two of each row's blocks of slots."""
    slots, steps = ring[0].shape[2], recent[0].shape[2]
    block = next(n for n in range(min(steps, slots), slots + 1) if slots % n == 0)
    # Both blocks have the new positions at the same places.
    source = held_positions(lengths, block) - start[:, None]
    newer = (held_positions(lengths, slots) >= start[:, None]).reshape(len(start), -1, block)
    blocks = tuple(x.reshape(*x.shape[:2], -1, block, *x.shape[3:]) for x in ring)
    new = tuple(_placed(x, source) for x in recent)
    if len(ring) > 2:
        flushed = _select_in_all(blocks, new, newer)
    else:
        flushed = _write_newer(blocks, new, newer, start // block)
    return tuple(x.reshape(old.shape) for x, old in zip(flushed, ring, strict=True))


def _placed(recent: jax.Array, source: Int[Array, "batch block"]) -> jax.Array:
    """Step `source` of a recent ring at each place of a block; zero for other numbers.

    By a product with zeros and ones, which is exact for finite numbers: on a TPU a gather of single
    positions takes longer than the rest of the flush.
    """
    hot = (source[:, :, None] == jnp.arange(recent.shape[2])).astype(recent.dtype)
    kept: Any = {"preferred_element_type": recent.dtype, "precision": "highest"}
    return jnp.einsum("bsn,bkn...->bks...", hot, recent, **kept)


def _write_newer(
    ring: RingCache,
    new: RingCache,
    newer: Bool[Array, "batch blocks block"],
    first: Int[Array, " batch"],
) -> RingCache:
    """Writes the blocks that have new positions: `first` and the next, in place if donated."""
    count = newer.shape[1]
    rows = jnp.arange(len(first))[:, None]
    at = (first[:, None] + jnp.arange(min(2, count))) % count
    mine = newer[rows, at][:, :, None]

    def one(old: jax.Array, new: jax.Array) -> jax.Array:
        written = jnp.where(_like(mine, old), new[:, None], old[rows, :, at])
        return old.at[rows, :, at].set(written, unique_indices=True)

    return tuple(map(one, ring, new))


def _select_in_all(
    ring: RingCache, new: RingCache, newer: Bool[Array, "batch blocks block"]
) -> RingCache:
    """Passes over all blocks, in place if donated.

    For rings in 8 bits: a TPU has no gather and scatter of them in their own layout, and copies a
    ring before and after, which takes twice as long as this pass.
    """

    def select(number: Int[Array, ""], ring: RingCache) -> RingCache:
        mine = newer[:, None, number]
        return tuple(
            x.at[:, :, number].set(jnp.where(_like(mine, y), y, x[:, :, number]))
            for x, y in zip(ring, new, strict=True)
        )

    return jax.lax.fori_loop(0, newer.shape[1], select, ring)


def _like(mask: Bool[Array, "*shape"], x: jax.Array) -> jax.Array:
    """The mask with as many axes as x."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _by_head(x: Keys) -> Float[Array, "batch kv_heads seq head_dim"]:
    return jnp.swapaxes(x, 1, 2)


def _attend(
    query: Queries,
    *,
    cache: tuple[RingCache, RingCache],
    visible: Sequence[Bool[Array, "batch _"]],
    softcap: float | None,
) -> Queries:
    """`attend_where` for one query per row, over the slots of a ring and its recent ring.

    Both share the maximum of their scores, so that no array holds the slots of both.
    """
    grouped = query.reshape(len(query), cache[0][0].shape[1], -1, query.shape[3])
    scores = [
        jnp.where(mask[:, None, None], soft_cap(_scores(grouped, ring), softcap), MASKED)
        for ring, mask in zip(cache, visible, strict=True)
    ]
    highest = jnp.maximum(*(x.max(axis=-1, keepdims=True) for x in scores))
    weights = [jnp.exp(x - highest) for x in scores]
    encoded = jnp.add(
        *(_weighted(x, ring, query.dtype) for x, ring in zip(weights, cache, strict=True))
    )
    encoded /= jnp.add(*(x.sum(axis=-1, keepdims=True) for x in weights))
    return encoded.astype(query.dtype).reshape(query.shape)


def _scores(
    query: Float[Array, "batch kv_heads group head_dim"], ring: RingCache
) -> Float[Array, "batch kv_heads group slots"]:
    keys, _, *scales = ring
    keys = keys.astype(query.dtype)
    scores = jnp.einsum("bkgh,bksh->bkgs", query, keys, preferred_element_type=jnp.float32)
    return scores * scales[0][:, :, None] if scales else scores


def _weighted(
    weights: Float[Array, "batch kv_heads group slots"], ring: RingCache, dtype: jnp.dtype
) -> Float[Array, "batch kv_heads group head_dim"]:
    _, values, *scales = ring
    weights = weights * scales[1][:, :, None] if scales else weights
    return jnp.einsum(
        "bkgs,bksh->bkgh",
        weights.astype(dtype),
        values.astype(dtype),
        preferred_element_type=jnp.float32,
    )
