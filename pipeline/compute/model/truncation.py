"""Which tokens are left by top-k, top-p and min-p: found by bisection, nothing is sorted.

It runs inside `shard_map`, as the head's passes do: every device has its share of the vocabulary,
and counts and masses are summed over the shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from pipeline.compute.model.head_blocks import FORBIDDEN
from pipeline.compute.model.sharding import VOCAB_AXES

_BITS = 32
_AT_ONCE = 2
_SIGN = np.uint32(1 << (_BITS - 1))
_LOWEST = np.nextafter(np.float32(FORBIDDEN), np.float32(0))
"""The lowest score that is not that of a forbidden token."""

Reaches = Callable[[Float[Array, " rows"]], Bool[Array, " rows"]]


@dataclass(frozen=True)
class Truncation:
    """What is cut away, one after the other.

    Attributes:
        top_k: all but the k likeliest tokens; 0 or the whole vocabulary: nothing.
        top_p: of what is left, all but the nucleus: the smallest set of likeliest tokens whose mass
            reaches p (arXiv:1904.09751); 1: nothing.
        min_p: tokens less likely than p times the likeliest one (arXiv:2407.01082); 0: nothing.
    """

    top_k: int
    top_p: float
    min_p: float


def threshold(
    scores: Float[Array, "rows part"], *, truncation: Truncation
) -> Float[Array, " rows"]:
    """The score of each row from which on tokens may be drawn.

    Exact but for the rounding of sums: tokens that tie with the last one kept stay. The likeliest
    token always stays, a forbidden one never does.

    Args:
        scores: of this device's share of the vocabulary, forbidden tokens at `FORBIDDEN`.
        truncation: what is cut away.
    """
    lowest = jnp.full(len(scores), _LOWEST)
    if 0 < truncation.top_k < scores.shape[-1] * jax.lax.axis_size(VOCAB_AXES):

        def holds_k(threshold: Float[Array, " rows"]) -> Bool[Array, " rows"]:
            return _total(scores >= threshold[:, None]) >= truncation.top_k

        lowest = jnp.maximum(lowest, _largest(holds_k, len(scores)))
    highest = jax.lax.pmax(scores.max(axis=-1), VOCAB_AXES)
    if truncation.top_p < 1.0:
        masses = jnp.exp(scores - highest[:, None])
        masses = jnp.where(scores >= lowest[:, None], masses, 0.0)
        # Never 0, which any threshold would reach.
        min_finished = max(truncation.top_p, float(np.finfo(np.float32).tiny)) * _total(masses)

        def holds_p(threshold: Float[Array, " rows"]) -> Bool[Array, " rows"]:
            return _total(jnp.where(scores >= threshold[:, None], masses, 0.0)) >= min_finished

        lowest = jnp.maximum(lowest, _largest(holds_p, len(scores)))
    if truncation.min_p > 0.0:
        lowest = jnp.maximum(lowest, highest + math.log(truncation.min_p))
    return lowest


def _total(values: Array) -> Array:
    """Sum over the whole vocabulary."""
    return jax.lax.psum(values.sum(axis=-1), VOCAB_AXES)


def _largest(reaches: Reaches, rows: int) -> Float[Array, " rows"]:
    """The largest float32 threshold of each row that `reaches`, which higher ones do not.

    By the bits of its place in the order of all float32 values, the highest first, `_AT_ONCE` of
    them at each look at the scores.
    """

    def narrow(number: Array, place: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        shift = _BITS - _AT_ONCE * (number.astype(jnp.uint32) + 1)
        higher = (place | (np.uint32(part) << shift) for part in range(1, 1 << _AT_ONCE))
        reached = sum(reaches(_value(one)).astype(jnp.uint32) for one in higher)
        return place | (reached << shift)

    place = jax.lax.fori_loop(0, _BITS // _AT_ONCE, narrow, jnp.zeros(rows, jnp.uint32))
    return _value(place)


def _value(place: UInt32[Array, " rows"]) -> Float[Array, " rows"]:
    """The float32 value at this place in the order: negative ones stand in the lower half."""
    bits = jnp.where(place >= _SIGN, place ^ _SIGN, ~place)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
