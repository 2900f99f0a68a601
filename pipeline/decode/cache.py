"""KV caches: a ring per layer, of the window for local layers, of the whole row for global ones.

Slot `s` of a ring of capacity C holds the last position p < n with p = s (mod C), where n is how
many positions the row has written. So a row's length alone says what each slot holds; there is no
array of positions and no mask to carry along. Prompts longer than a ring leave their last C
positions in it.

A ring may be kept in 8 bits: each key and each value as 256 steps of a scale of its own, the
largest of its numbers being step 127. What is multiplied are the steps; the scores of a key and the
weight of a value take its scale, so that nothing is ever written out at full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Shaped

from pipeline.model.attention import attend_causally, attend_where
from pipeline.model.gemma import Architecture

RingCache = tuple[Shaped[Array, "batch slots kv_heads _"], ...]
"""Keys and values of one layer; in 8 bits their steps, then their scales, which have one part."""

_STEPS = 127


def capacity(*, window: int | None, max_tokens: int) -> int:
    """Slots of a layer's ring in a row of at most `max_tokens` positions."""
    return max_tokens if window is None else min(window, max_tokens)


def empty_rings(
    architecture: Architecture, *, rows: int, max_tokens: int, eight_bits: bool
) -> tuple[RingCache, ...]:
    """Rings of `rows` rows of at most `max_tokens` positions, one a layer, with zeros in them."""
    config = architecture.config

    def rings(layer: int) -> RingCache:
        size = capacity(window=architecture.window(layer), max_tokens=max_tokens)
        nothing = jnp.zeros((rows, size, config.num_kv_heads, config.head_dim), config.param_dtype)
        return _kept(nothing, nothing, eight_bits=eight_bits)

    return tuple(rings(layer) for layer in range(config.num_layers))


def bytes_per_row(architecture: Architecture, *, max_tokens: int, eight_bits: bool = False) -> int:
    """KV bytes of one row over all layers."""
    rings = jax.eval_shape(
        lambda: empty_rings(architecture, rows=1, max_tokens=max_tokens, eight_bits=eight_bits)
    )
    return sum(ring.size * ring.dtype.itemsize for ring in jax.tree.leaves(rings))


def _kept(
    key: Float[Array, "batch slots kv_heads head_dim"],
    value: Float[Array, "batch slots kv_heads head_dim"],
    *,
    eight_bits: bool,
) -> RingCache:
    if not eight_bits:
        return key, value
    keys, key_scales = _steps(key)
    values, value_scales = _steps(value)
    return keys, values, key_scales, value_scales


def _steps(
    x: Float[Array, "batch slots kv_heads head_dim"],
) -> tuple[Int8[Array, "batch slots kv_heads head_dim"], Float[Array, "batch slots kv_heads 1"]]:
    """The nearest of 255 steps, and how large a step is."""
    exact = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(exact), axis=-1, keepdims=True) / _STEPS
    steps = jnp.round(exact / jnp.where(scale > 0, scale, 1.0))
    return steps.astype(jnp.int8), scale


def held_positions(lengths: Int[Array, " batch"], slots: int) -> Int[Array, "batch slots"]:
    """Position held by each slot of a ring after `lengths` positions; negative: none yet."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(slots)[None, :]) % slots


@dataclass(frozen=True)
class PromptAttention:
    """`Attend` for prefill: causal attention, and a ring filled with what will still be seen.

    Attributes:
        lengths: real tokens of each row; the padding behind them never enters a ring.
        max_tokens: longest row that the rings have to serve.
        eight_bits: how rings are kept.
    """

    lengths: Int[Array, " batch"]
    max_tokens: int
    eight_bits: bool = False

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        *,
        window: int | None,
        softcap: float | None,
        cache: None,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], RingCache]:
        """See `Attend`."""
        encoded, _ = attend_causally(query, key, value, window=window, softcap=softcap, cache=cache)
        slots = capacity(window=window, max_tokens=self.max_tokens)
        source = jnp.clip(held_positions(self.lengths, slots), 0, key.shape[1] - 1)

        def ring(x: Float[Array, "batch seq kv_heads head_dim"]) -> jax.Array:
            return jnp.take_along_axis(x, source[:, :, None, None], axis=1)

        return encoded, _kept(ring(key), ring(value), eight_bits=self.eight_bits)


@dataclass(frozen=True)
class TokenAttention:
    """`Attend` for decoding: one new position a row, written to its ring and attending to it.

    Attributes:
        positions: position of each row's new token; rows may stand at different places.
    """

    positions: Int[Array, " batch"]

    def __call__(
        self,
        query: Float[Array, "batch 1 heads head_dim"],
        key: Float[Array, "batch 1 kv_heads head_dim"],
        value: Float[Array, "batch 1 kv_heads head_dim"],
        *,
        window: int | None,
        softcap: float | None,
        cache: RingCache,
    ) -> tuple[Float[Array, "batch 1 heads head_dim"], RingCache]:
        """See `Attend`. A ring never holds more than the window, so `window` is met by itself."""
        del window
        new = _kept(key, value, eight_bits=len(cache) > 2)
        kept = tuple(_write(ring, x, self.positions) for ring, x in zip(cache, new, strict=True))
        keys, values, *scales = kept
        mask = seen(self.positions, slots=keys.shape[1])[:, None]
        encoded = attend_where(query, keys, values, *scales, seen=mask, softcap=softcap)
        return encoded, kept


def seen(positions: Int[Array, " batch"], *, slots: int) -> Bool[Array, "batch slots"]:
    """Slots that a query at `positions` attends to, its own included."""
    return held_positions(positions + 1, slots) >= 0


def _write(
    ring: Shaped[Array, "batch slots kv_heads parts"],
    new: Shaped[Array, "batch 1 kv_heads parts"],
    positions: Int[Array, " batch"],
) -> Shaped[Array, "batch slots kv_heads parts"]:
    slot = positions % ring.shape[1]

    def one_row(row: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(row, value, slot, axis=0)

    return jax.vmap(one_row)(ring, new, slot)


Caches = Sequence[RingCache]
"""One ring cache a layer."""
