"""Gumbel noise of a range of the vocabulary, as a function of a key and the token ids.

The argmax of scores plus standard Gumbel noise is a sample from their softmax (Gumbel-max; Maddison
et al., arXiv:1411.0030). Sampling in blocks needs the noise of some tokens without that of the
others, independent of the block sizes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32

_HALF = 128
"""Threefry returns two numbers per call: one for each of two adjacent ranges of this many tokens,
so that on a TPU no values move within a register."""

TILE = 2 * _HALF
"""Ranges whose start and size are multiples of this cost half as much."""


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
        keys: from `keys_at`.
        first: id of the first token.
        size: number of tokens.
        aligned: whether `first` and `size` are multiples of `TILE`; halves the work.
    """
    if aligned:
        pairs = jnp.asarray(first, jnp.uint32) // 2 + jnp.arange(size // 2, dtype=jnp.uint32)
        words = _threefry(keys, pairs).reshape(len(keys), 2, -1, _HALF)
        one, other = words[:, 0], words[:, 1]
        halves = [noise_of_words(one, other), noise_of_words(other, one)]
        return jnp.stack(halves, axis=2).reshape(len(keys), size)
    ids = jnp.asarray(first, jnp.uint32) + jnp.arange(size, dtype=jnp.uint32)
    words = _threefry(keys, ids // TILE * _HALF + ids % _HALF)
    one, other = words[:, 0], words[:, 1]
    in_first_half = ids // _HALF % 2 == 0
    return noise_of_words(
        jnp.where(in_first_half, one, other), jnp.where(in_first_half, other, one)
    )


def noise_of_words(
    words: UInt32[Array, "*shape"], partners: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Standard Gumbel noise, a decreasing function of 48 random bits.

    With a word w and the 16 low bits b of its partner, the tail probability P(noise > g) is
    V = (w + (b + 1/2) 2^-16) 2^-32 for w < 2^31. For the other words the same formula, with the
    complement of w, gives P(noise < g) = 1 - V. The noise is g = -log(-log(1 - V)).

    Range: -3.52 to 33.96, that is -log(49 log 2) to 49 log 2. Resolution: V in steps of 2^-48 at
    both ends, and 24 significant bits of V or 1 - V in between. Noise of 32 bits or fewer samples
    tokens of probability 1e-9 at a wrong rate, and tokens below the last step never.

    Words of a pair serve as each other's partners, so no further random numbers are computed. The
    tail probability of one, to 48 bits, and that of the other, to 16 bits, are independent. The
    shared bits change V by at most one part in w + 1, so they matter only for words near the ends.

    Args:
        words: uniformly random.
        partners: uniformly random and independent of `words`.
    """
    signed = jax.lax.bitcast_convert_type(words, jnp.int32)
    upper = signed >= 0
    # Steps to the nearer end of the range, 31 bits: TPUs convert only signed integers natively.
    steps = jnp.where(upper, signed, ~signed).astype(jnp.float32)
    fraction = (partners & 0xFFFF).astype(jnp.int32).astype(jnp.float32) * 2.0**-16 + 2.0**-17
    tail = steps * 2.0**-32 + fraction * 2.0**-32
    return -jnp.log(-jnp.where(upper, jnp.log1p(-tail), jnp.log(tail)))


def _threefry(
    keys: UInt32[Array, "rows 2"], counters: UInt32[Array, " pairs"]
) -> UInt32[Array, "rows 2 pairs"]:
    count = jnp.concatenate([counters, jnp.zeros_like(counters)])
    return jax.vmap(lambda key: threefry_2x32(key, count))(keys).reshape(len(keys), 2, -1)
