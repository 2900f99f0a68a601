"""Drawing one token a row from its logits, with noise that depends on the rollout's name alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pipeline.model.gumbel import TILE, gumbel_noise
from pipeline.model.head_blocks import FORBIDDEN


def truncate(
    logits: Float[Array, "batch vocab"], *, top_k: int, top_p: float
) -> Float[Array, "batch vocab"]:
    """Logits with everything outside the top k and outside the nucleus at `FORBIDDEN`.

    The nucleus (arXiv:1904.09751) is the smallest set of likeliest tokens, taken from the
    distribution left by top-k, whose mass reaches `top_p`. Exact: tokens that tie with the last
    one taken stay in. `top_k = 0` and `top_p = 1` switch the respective part off.
    """
    if top_k == 0 and top_p == 1.0:
        return logits
    ranked = jnp.sort(logits, axis=-1, descending=True)
    if 0 < top_k < logits.shape[-1]:
        ranked = jnp.where(jnp.arange(logits.shape[-1]) < top_k, ranked, FORBIDDEN)
    kept = ranked > FORBIDDEN
    if top_p < 1.0:  # else rounding to a mass of 1 would drop the last of the top k
        mass = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1)
        before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
        kept &= before < top_p
    threshold = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, FORBIDDEN)


def sample(
    logits: Float[Array, "batch vocab"],
    keys: UInt32[Array, "batch 2"],
    *,
    noise: Float[Array, ""],
    top_k: int,
    top_p: float,
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """One token a row, and its log-prob under the full distribution.

    Args:
        logits: temperature-scaled, forbidden tokens at `FORBIDDEN`.
        keys: each row's random key at this position, see `gumbel.keys_at`.
        noise: 1.0 draws (Gumbel-max), 0.0 takes the likeliest token.
        top_k: see `truncate`.
        top_p: see `truncate`.
    """
    vocab = logits.shape[-1]
    noisy = noise * gumbel_noise(keys, 0, vocab, aligned=vocab % TILE == 0)
    scores = truncate(logits, top_k=top_k, top_p=top_p) + noisy
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, picked - jax.nn.logsumexp(logits, axis=-1)
