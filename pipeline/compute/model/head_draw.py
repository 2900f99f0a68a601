"""The head's passes that draw, noise included, on one device.

They run inside `shard_map`, as the passes of head_blocks.py do; what the shares of the vocabulary
find is combined after each block of positions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pipeline.compute.model.gumbel import TILE, gumbel_noise
from pipeline.compute.model.head_blocks import (
    FORBIDDEN,
    Blocks,
    block_scores,
    by_block,
    count_blocks,
)
from pipeline.compute.model.sharding import VOCAB_AXES
from pipeline.compute.model.truncation import Truncation, threshold

RolloutStep = tuple[Int[Array, " block"], Float[Array, " block"], Float[Array, " block"]]
"""Tokens, log-probs under the whole distribution and under what could be drawn."""

_WHOLE_ROWS = 4
"""Scores that exist at a time where something is cut away, in blocks of those without."""


def draw(
    blocks: Blocks,
    truncation: Truncation | None,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> tuple[Int[Array, " tokens"], Float[Array, " tokens"], Float[Array, " tokens"]]:
    """One token for each position, and its log-prob under both distributions, see `RolloutStep`.

    Args:
        blocks: see `Blocks`; its temperature is 1.
        truncation: what is cut away; None: nothing, so that the log-probs are the same.
        embedding: as in `forward`.
        forbidden: as in `forward`.
        by_position: hidden states as in `forward`; keys of the noise, `tokens 2`, see
            `gumbel.keys_at`; what divides the scores; 1.0 to draw, 0.0 to take the likeliest token.
    """
    vocabulary = embedding, forbidden
    if truncation is None:
        tokens, logprobs = by_block(blocks, partial(_in_blocks, blocks, *vocabulary), *by_position)
        return tokens, logprobs, logprobs
    # A threshold is known only after many looks at all scores of a row, which are therefore kept,
    # and each block of rows reads the whole embedding: of few rows, but not of too few.
    vocab = embedding.shape[0]
    rows = max(1, _WHOLE_ROWS * blocks.tokens * min(blocks.vocab, vocab) // vocab)
    whole = replace(blocks, tokens=rows, vocab=vocab)
    return by_block(whole, partial(_truncated, whole, truncation, *vocabulary), *by_position)


def _in_blocks(
    blocks: Blocks,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """In one pass over the vocabulary.

    The largest noisy score so far, and the sum of exponentials for the log-prob's denominator.
    """
    hidden, keys, temperature, noise = by_position
    vocab = embedding.shape[0]
    size = min(blocks.vocab, vocab)
    aligned = vocab % TILE == 0 and size % TILE == 0
    offset = jax.lax.axis_index(VOCAB_AXES) * vocab

    def step(carry: Any, number: Int[Array, ""]) -> tuple[Any, None]:
        highest, total, best, token, drawn = carry
        _, scores, start = block_scores(blocks, hidden, embedding, forbidden, number)
        scores /= temperature[:, None]
        new = jnp.maximum(highest, scores.max(axis=-1))
        total = total * jnp.exp(highest - new) + jnp.exp(scores - new[:, None]).sum(axis=-1)
        noisy = gumbel_noise(keys, offset + start, size, aligned=aligned)
        found, at, score = _best(scores + noise[:, None] * noisy, scores)
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
    token, drawn = _best_of_shares(best, token, drawn)
    return token, drawn - log_z


def _truncated(
    blocks: Blocks,
    truncation: Truncation,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> RolloutStep:
    """From the tokens that `truncation` leaves; `blocks` has one block of the vocabulary."""
    hidden, keys, temperature, noise = by_position
    vocab = embedding.shape[0]
    offset = jax.lax.axis_index(VOCAB_AXES) * vocab
    _, scores, _ = block_scores(blocks, hidden, embedding, forbidden, jnp.int32(0))
    scores = jnp.where(forbidden, FORBIDDEN, scores / temperature[:, None])
    allowed = scores >= threshold(scores, truncation=truncation)[:, None]
    highest = jax.lax.pmax(scores.max(axis=-1), VOCAB_AXES)
    masses = jnp.exp(scores - highest[:, None])
    kept = jnp.where(allowed, masses, 0.0)
    log_z, log_kept = (
        highest + jnp.log(jax.lax.psum(x.sum(axis=-1), VOCAB_AXES)) for x in (masses, kept)
    )
    noisy = gumbel_noise(keys, offset, vocab, aligned=vocab % TILE == 0)
    noisy = jnp.where(allowed, scores + noise[:, None] * noisy, -jnp.inf)
    best, at, score = _best(noisy, scores)
    token, drawn = _best_of_shares(best, offset + at, score)
    return token, drawn - log_z, drawn - log_kept


def _best(
    noisy: Float[Array, "block part"], scores: Float[Array, "block part"]
) -> tuple[Float[Array, " block"], Int[Array, " block"], Float[Array, " block"]]:
    """The largest noisy score, where it is, and the score there without noise."""
    at = noisy.argmax(axis=-1)
    found, score = (jnp.take_along_axis(x, at[:, None], axis=-1)[:, 0] for x in (noisy, scores))
    return found, at, score


def _best_of_shares(
    best: Float[Array, " block"], token: Int[Array, " block"], score: Float[Array, " block"]
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Over all shares of the vocabulary: the token with the best noisy score, and its score."""
    top = jax.lax.pmax(best, VOCAB_AXES)
    # Of scores that are no numbers the log-prob says so; the token is some token.
    mine = (best == top) | jnp.isnan(top)
    chosen = jax.lax.pmin(jnp.where(mine, token, np.iinfo(np.int32).max), VOCAB_AXES)
    return chosen, jax.lax.pmax(jnp.where(token == chosen, score, -jnp.inf), VOCAB_AXES)
