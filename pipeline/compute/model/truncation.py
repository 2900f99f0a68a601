"""Top-k, top-p and min-p: the score threshold by bisection, without a sort.

Runs inside `shard_map` like the head's passes: every device has its shard of the vocabulary, and
counts and masses are summed over the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from pipeline.compute.model.head import FORBIDDEN
from pipeline.compute.model.sharding import VOCAB_AXES

_BITS = 32
_BITS_PER_STEP = 2
_SIGN = np.uint32(1 << (_BITS - 1))
_LOWEST = np.nextafter(np.float32(FORBIDDEN), np.float32(0))
"""The lowest score of an allowed token."""

Reaches = Callable[[Float[Array, " rows"]], Bool[Array, " rows"]]


@dataclass(frozen=True)
class Truncation:
    """Truncation of the distribution, applied in this order.

    Attributes:
        top_k: keeps the k most likely tokens; 0 or the whole vocabulary: off.
        top_p: keeps the nucleus of the remaining distribution: the smallest set of most likely
            tokens whose mass reaches p (arXiv:1904.09751); 1: off.
        min_p: removes tokens less likely than p times the most likely one (arXiv:2407.01082);
            0: off.
    """

    top_k: int
    top_p: float
    min_p: float


def threshold(
    scores: Float[Array, "rows part"], *, truncation: Truncation
) -> Float[Array, " rows"]:
    """The lowest score of each row that can be sampled.

    Exact except for the rounding of sums; tokens that tie with the last kept one are kept. The most
    likely token is always kept, a forbidden one never.

    Args:
        scores: of this device's shard of the vocabulary, forbidden tokens at `FORBIDDEN`.
        truncation: top-k, top-p and min-p.
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
        # Positive, because any threshold reaches a mass of 0.
        target = max(truncation.top_p, float(np.finfo(np.float32).tiny)) * _total(masses)

        def holds_p(threshold: Float[Array, " rows"]) -> Bool[Array, " rows"]:
            return _total(jnp.where(scores >= threshold[:, None], masses, 0.0)) >= target

        lowest = jnp.maximum(lowest, _largest(holds_p, len(scores)))
    if truncation.min_p > 0.0:
        lowest = jnp.maximum(lowest, highest + math.log(truncation.min_p))
    return lowest


def _total(values: Array) -> Array:
    """Sum over the whole vocabulary."""
    return jax.lax.psum(values.sum(axis=-1), VOCAB_AXES)


def _largest(reaches: Reaches, rows: int) -> Float[Array, " rows"]:
    """The largest float32 threshold of each row for which the monotone `reaches` is True.

    Bisects the rank in the order of all float32 values, from its highest bit, `_BITS_PER_STEP` bits
    per pass over the scores.
    """

    def narrow(number: Array, rank: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        shift = _BITS - _BITS_PER_STEP * (number.astype(jnp.uint32) + 1)
        higher = (rank | (np.uint32(part) << shift) for part in range(1, 1 << _BITS_PER_STEP))
        reached = sum(reaches(_value(one)).astype(jnp.uint32) for one in higher)
        return rank | (reached << shift)

    rank = jax.lax.fori_loop(0, _BITS // _BITS_PER_STEP, narrow, jnp.zeros(rows, jnp.uint32))
    return _value(rank)


def _value(rank: UInt32[Array, " rows"]) -> Float[Array, " rows"]:
    """The float32 value with this rank; negative values are in the lower half."""
    bits = jnp.where(rank >= _SIGN, rank ^ _SIGN, ~rank)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
