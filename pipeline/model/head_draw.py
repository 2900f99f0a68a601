"""The head's pass that draws: over blocks of the vocabulary, noise included, on one device.

It runs inside `shard_map`, as the passes of head_blocks.py do; what the shares of the vocabulary
find is combined after each block of positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pipeline.model.gumbel import TILE, gumbel_noise
from pipeline.model.head_blocks import FORBIDDEN, Blocks, block_scores, by_block, count_blocks
from pipeline.model.sharding import VOCAB_AXES


def draw(
    blocks: Blocks,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> tuple[Int[Array, " tokens"], Float[Array, " tokens"]]:
    """One token for each position and its log-prob, in one pass over the vocabulary.

    The largest noisy score so far, and the sum of exponentials for the log-prob's denominator.

    Args:
        blocks: see `Blocks`; its temperature is 1.
        embedding: as in `forward`.
        forbidden: as in `forward`.
        by_position: hidden states as in `forward`; keys of the noise, `tokens 2`, see
            `gumbel.keys_at`; what divides the scores; 1.0 to draw, 0.0 to take the likeliest token.
    """
    vocab = embedding.shape[0]
    size = min(blocks.vocab, vocab)
    aligned = vocab % TILE == 0 and size % TILE == 0

    def block(
        hidden: Float[Array, "block embed"],
        keys: UInt32[Array, "block 2"],
        temperature: Float[Array, " block"],
        noise: Float[Array, " block"],
    ) -> tuple[Array, Array]:
        offset = jax.lax.axis_index(VOCAB_AXES) * vocab

        def step(carry: Any, number: Int[Array, ""]) -> tuple[Any, None]:
            highest, total, best, token, drawn = carry
            _, scores, start = block_scores(blocks, hidden, embedding, forbidden, number)
            scores /= temperature[:, None]
            new = jnp.maximum(highest, scores.max(axis=-1))
            total = total * jnp.exp(highest - new) + jnp.exp(scores - new[:, None]).sum(axis=-1)
            noisy = gumbel_noise(keys, offset + start, size, aligned=aligned)
            noisy = scores + noise[:, None] * noisy
            at = noisy.argmax(axis=-1)
            found, score = (
                jnp.take_along_axis(x, at[:, None], axis=-1)[:, 0] for x in (noisy, scores)
            )
            # The first of equal ones, as over the whole vocabulary.
            better = found > best
            token = jnp.where(better, offset + start + at, token)
            drawn = jnp.where(better, score, drawn)
            return (new, total, jnp.maximum(best, found), token, drawn), None

        nothing = jnp.zeros(len(hidden), jnp.float32)
        low = nothing + FORBIDDEN
        start = low, nothing, low - jnp.inf, jnp.zeros(len(hidden), jnp.int32), low
        carry, _ = jax.lax.scan(step, start, jnp.arange(count_blocks(blocks, embedding)))
        highest, total, best, token, drawn = carry
        overall = jax.lax.pmax(highest, VOCAB_AXES)
        log_z = overall + jnp.log(jax.lax.psum(total * jnp.exp(highest - overall), VOCAB_AXES))
        top = jax.lax.pmax(best, VOCAB_AXES)
        # Of scores that are no numbers the log-prob says so; the token is some token.
        mine = (best == top) | jnp.isnan(top)
        chosen = jax.lax.pmin(jnp.where(mine, token, np.iinfo(np.int32).max), VOCAB_AXES)
        drawn = jax.lax.pmax(jnp.where(token == chosen, drawn, -jnp.inf), VOCAB_AXES)
        return chosen, drawn - log_z

    return by_block(blocks, block, *by_position)
