"""KV caches: a ring per layer, of the window for local layers, of the whole row for global ones.

Slot `s` of a ring of capacity C holds the last position p < n with p = s (mod C), where n is how
many positions the row has written. So a row's length alone says what each slot holds; there is no
array of positions and no mask to carry along. Prompts longer than a ring leave their last C
positions in it.

While a segment is decoded rings are only read. Rows stand at different places, and a TPU would
write one row after the other, at each step; so new positions go to `recent` rings, in which step i
of the segment is slot i for every row, and `settle` brings them home when the segment ends.

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

from pipeline.compute.model.attention import UNSEEN, attend_causally, soft_cap
from pipeline.compute.model.gemma import Architecture

RingCache = tuple[Shaped[Array, "batch kv_heads ..."], ...]
"""Keys and values of one layer, `batch kv_heads slots head_dim`; in 8 bits their steps, then their
scales, `batch kv_heads slots`.

A kv head's positions stand together: were the heads last but one, a TPU would hold twice the bytes
where there is one, as in Gemma 3 1b, and a copy of every ring beside it."""

_STEPS = 127


def capacity(*, window: int | None, max_tokens: int) -> int:
    """Slots of a layer's ring in a row of at most `max_tokens` positions."""
    return max_tokens if window is None else min(window, max_tokens)


def empty_rings(
    architecture: Architecture, *, rows: int, max_tokens: int, eight_bits: bool
) -> tuple[RingCache, ...]:
    """Rings of `rows` rows of at most `max_tokens` positions, one a layer, with zeros in them."""
    return tuple(
        _zeros(
            architecture,
            rows=rows,
            slots=capacity(window=architecture.window(layer), max_tokens=max_tokens),
            eight_bits=eight_bits,
        )
        for layer in range(architecture.config.num_layers)
    )


def empty_recent(
    architecture: Architecture, *, rows: int, steps: int, eight_bits: bool
) -> tuple[RingCache, ...]:
    """What a segment of so many steps adds to the rings, one a layer, with zeros in them."""
    layers = range(architecture.config.num_layers)
    return tuple(
        _zeros(architecture, rows=rows, slots=steps, eight_bits=eight_bits) for _ in layers
    )


def _zeros(architecture: Architecture, *, rows: int, slots: int, eight_bits: bool) -> RingCache:
    config = architecture.config
    nothing = jnp.zeros((rows, config.num_kv_heads, slots, config.head_dim), config.param_dtype)
    return _kept(nothing, nothing, eight_bits=eight_bits)


def bytes_per_row(architecture: Architecture, *, max_tokens: int, eight_bits: bool = False) -> int:
    """KV bytes of one row over all layers."""
    rings = jax.eval_shape(
        lambda: empty_rings(architecture, rows=1, max_tokens=max_tokens, eight_bits=eight_bits)
    )
    return sum(ring.size * ring.dtype.itemsize for ring in jax.tree.leaves(rings))


def _kept(
    key: Float[Array, "batch kv_heads slots head_dim"],
    value: Float[Array, "batch kv_heads slots head_dim"],
    *,
    eight_bits: bool,
) -> RingCache:
    if not eight_bits:
        return key, value
    keys, key_scales = _steps(key)
    values, value_scales = _steps(value)
    return keys, values, key_scales, value_scales


def _steps(
    x: Float[Array, "batch kv_heads slots head_dim"],
) -> tuple[Int8[Array, "batch kv_heads slots head_dim"], Float[Array, "batch kv_heads slots"]]:
    """The nearest of 255 steps, and how large a step is."""
    exact = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(exact), axis=-1) / _STEPS
    steps = jnp.round(exact / jnp.where(scale > 0, scale, 1.0)[..., None])
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
            return jnp.take_along_axis(_by_head(x), source[:, None, :, None], axis=2)

        return encoded, _kept(ring(key), ring(value), eight_bits=self.eight_bits)


@dataclass(frozen=True)
class TokenAttention:
    """`Attend` for decoding: one new position a row, attending to a ring and what came after it.

    A layer's cache is its ring and its recent ring; what is kept is the recent one.

    Attributes:
        begun: positions in each row's ring.
        positions: position of each row's new token; rows may stand at different places.
        step: slot of the new position in the recent rings, the same for all rows.
    """

    begun: Int[Array, " batch"]
    positions: Int[Array, " batch"]
    step: Int[Array, ""]

    def __call__(
        self,
        query: Float[Array, "batch 1 heads head_dim"],
        key: Float[Array, "batch 1 kv_heads head_dim"],
        value: Float[Array, "batch 1 kv_heads head_dim"],
        *,
        window: int | None,
        softcap: float | None,
        cache: tuple[RingCache, RingCache],
    ) -> tuple[Float[Array, "batch 1 heads head_dim"], RingCache]:
        """See `Attend`."""
        ring, recent = cache
        new = _kept(_by_head(key), _by_head(value), eight_bits=len(ring) > 2)
        recent = tuple(
            jax.lax.dynamic_update_slice_in_dim(slots, x, self.step, axis=2)
            for slots, x in zip(recent, new, strict=True)
        )
        held = jnp.concatenate(
            [
                held_positions(self.begun, ring[0].shape[2]),
                self.begun[:, None] + jnp.arange(recent[0].shape[2]),
            ],
            axis=1,
        )
        visible = seen(held, self.positions, window=window)
        return _attend(query, ring, recent, visible=visible, softcap=softcap), recent


def seen(
    held: Int[Array, "batch slots"], positions: Int[Array, " batch"], *, window: int | None
) -> Bool[Array, "batch slots"]:
    """Slots that a query at `positions` attends to, its own included, by what they hold."""
    behind = positions[:, None] - held
    visible = (held >= 0) & (behind >= 0)
    return visible if window is None else visible & (behind < window)


def settle(
    ring: RingCache,
    recent: RingCache,
    *,
    begun: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> RingCache:
    """The ring with the positions from `begun` to `lengths - 1`, which are in the recent one."""
    held = held_positions(lengths, ring[0].shape[2])
    source = jnp.clip(held - begun[:, None], 0, recent[0].shape[2] - 1)
    newer = held >= begun[:, None]

    def one(old: jax.Array, new: jax.Array) -> jax.Array:
        more = (1,) * (old.ndim - 3)
        at = source.reshape(len(source), 1, -1, *more)
        chosen = newer.reshape(len(newer), 1, -1, *more)
        return jnp.where(chosen, jnp.take_along_axis(new, at, axis=2), old)

    return tuple(one(old, new) for old, new in zip(ring, recent, strict=True))


def _by_head(
    x: Float[Array, "batch seq kv_heads head_dim"],
) -> Float[Array, "batch kv_heads seq head_dim"]:
    return jnp.swapaxes(x, 1, 2)


def _attend(
    query: Float[Array, "batch 1 heads head_dim"],
    ring: RingCache,
    recent: RingCache,
    *,
    visible: Bool[Array, "batch all_slots"],
    softcap: float | None,
) -> Float[Array, "batch 1 heads head_dim"]:
    """softmax(capped scores of the keys that are visible) x values, the softmax in float32.

    Recent slots stand behind those of the ring. Each kv head serves heads / kv_heads query heads
    that stand together.
    """
    slots = ring[0].shape[2]
    grouped = query.reshape(len(query), ring[0].shape[1], -1, query.shape[3])
    scores = jnp.concatenate([_scores(grouped, ring), _scores(grouped, recent)], axis=-1)
    scores = jnp.where(visible[:, None, None], soft_cap(scores, softcap), UNSEEN)
    weights = jax.nn.softmax(scores, axis=-1)
    encoded = _weighted(weights[..., :slots], ring, query.dtype)
    encoded += _weighted(weights[..., slots:], recent, query.dtype)
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


Caches = Sequence[RingCache]
"""One ring cache a layer."""
