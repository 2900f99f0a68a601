"""Gumbel noise of any stretch of the vocabulary, a function of a key and of the tokens' ids.

The largest of scores plus standard Gumbel noise is a sample of their softmax (Gumbel-max; Maddison
et al., arXiv:1411.0030). Sampling in blocks needs the noise of some tokens without that of the
others, and the same whatever the blocks are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32

_HALF = 128
"""Threefry gives two numbers at a time: one for each of two neighbouring stretches of this many
tokens, so that on a TPU nothing is moved within a register."""

TILE = 2 * _HALF
"""Stretches that begin at a multiple of this and are multiples of it cost half as much."""


def keys_at(
    keys: UInt32[Array, "rows 2"], positions: Int[Array, " rows"]
) -> UInt32[Array, "rows 2"]:
    """Each row's key at a position of its completion."""

    def one(key: UInt32[Array, " 2"], position: Int[Array, ""]) -> UInt32[Array, " 2"]:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.key_data(folded)

    return jax.vmap(one)(keys, positions)


def gumbel_noise(
    keys: UInt32[Array, "rows 2"], first: Int[Array, ""] | int, size: int, *, aligned: bool = False
) -> Float[Array, "rows size"]:
    """Standard Gumbel noise of the tokens `first` to `first + size - 1`.

    Args:
        keys: of `keys_at`.
        first: id of the first token.
        size: how many tokens.
        aligned: `first` and `size` are known to be multiples of `TILE`; saves half of the work.
    """
    if aligned:
        pairs = jnp.asarray(first, jnp.uint32) // 2 + jnp.arange(size // 2, dtype=jnp.uint32)
        both = _threefry(keys, pairs).reshape(len(keys), 2, -1, _HALF)
        bits = both.swapaxes(1, 2).reshape(len(keys), size)
    else:
        ids = jnp.asarray(first, jnp.uint32) + jnp.arange(size, dtype=jnp.uint32)
        both = _threefry(keys, ids // TILE * _HALF + ids % _HALF)
        bits = jnp.where(ids // _HALF % 2 == 0, both[:, 0], both[:, 1])
    # As `jax.random.gumbel` does: 23 random bits in [0, 1), never 0.
    ones = np.array(1.0, np.float32).view(np.uint32)
    uniform = jax.lax.bitcast_convert_type((bits >> 9) | ones, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, np.finfo(np.float32).tiny)))


def _threefry(
    keys: UInt32[Array, "rows 2"], counters: UInt32[Array, " pairs"]
) -> UInt32[Array, "rows 2 pairs"]:
    count = jnp.concatenate([counters, jnp.zeros_like(counters)])
    return jax.vmap(lambda key: threefry_2x32(key, count))(keys).reshape(len(keys), 2, -1)
