"""KV caches: a ring per layer, of the window for local layers, of the whole row for global ones.

Slot `s` of a ring of capacity C holds the last position p < n with p = s (mod C), where n is how
many positions the row has written. So a row's length alone says what each slot holds; there is no
array of positions and no mask to carry along. Prompts longer than a ring leave their last C
positions in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline.model.attention import attend_causally, attend_where
from pipeline.model.gemma import Architecture

RingCache = tuple[Float[Array, "batch slots kv_heads head_dim"], ...]
"""Keys and values of one layer."""


def capacity(*, window: int | None, max_tokens: int) -> int:
    """Slots of a layer's ring in a row of at most `max_tokens` positions."""
    return max_tokens if window is None else min(window, max_tokens)


def bytes_per_row(architecture: Architecture, *, max_tokens: int) -> int:
    """KV bytes of one row over all layers."""
    config = architecture.config
    slots = sum(
        capacity(window=architecture.window(layer), max_tokens=max_tokens)
        for layer in range(config.num_layers)
    )
    per_slot = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.param_dtype).itemsize
    return slots * per_slot


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
    """

    lengths: Int[Array, " batch"]
    max_tokens: int

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

        return encoded, (ring(key), ring(value))


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
        keys, values = (
            _write(ring, new, self.positions) for ring, new in zip(cache, (key, value), strict=True)
        )
        mask = seen(self.positions, slots=keys.shape[1])[:, None]
        encoded = attend_where(query, keys, values, seen=mask, softcap=softcap)
        return encoded, (keys, values)


def seen(positions: Int[Array, " batch"], *, slots: int) -> Bool[Array, "batch slots"]:
    """Slots that a query at `positions` attends to, its own included."""
    return held_positions(positions + 1, slots) >= 0


def _write(
    ring: Float[Array, "batch slots kv_heads head_dim"],
    new: Float[Array, "batch 1 kv_heads head_dim"],
    positions: Int[Array, " batch"],
) -> Float[Array, "batch slots kv_heads head_dim"]:
    slot = positions % ring.shape[1]

    def one_row(row: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(row, value, slot, axis=0)

    return jax.vmap(one_row)(ring, new, slot)


Caches = Sequence[RingCache]
"""One ring cache a layer."""
