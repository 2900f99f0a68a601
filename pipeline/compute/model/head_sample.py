"""The head's sampling passes, noise included, on one device.

They run inside `shard_map` like the passes of head_blocks.py; the results of the vocabulary shards
are combined after each block of positions.
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

SampledTokens = tuple[Int[Array, " block"], Float[Array, " block"], Float[Array, " block"]]
"""Tokens, log-probs under the full distribution and under the truncated one."""

_TRUNCATED_BLOCKS = 4
"""Scores that exist at a time with truncation, as a multiple of those without."""


def sample(
    blocks: Blocks,
    truncation: Truncation | None,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> tuple[Int[Array, " tokens"], Float[Array, " tokens"], Float[Array, " tokens"]]:
    """Samples one token for each position; log-probs as in `SampledTokens`.

    Args:
        blocks: see `Blocks`; its temperature is 1.
        truncation: top-k, top-p and min-p; None: no truncation, and both log-probs are the same.
        embedding: as in `forward`.
        forbidden: as in `forward`.
        by_position: hidden states as in `forward`; RNG keys, `tokens 2`, see `gumbel.keys_at`;
            temperature; noise scale: 1.0 samples, 0.0 takes the most likely token.
    """
    vocabulary = embedding, forbidden
    if truncation is None:
        tokens, logprobs = by_block(blocks, partial(_in_blocks, blocks, *vocabulary), *by_position)
        return tokens, logprobs, logprobs
    # The bisection for the threshold reads all scores of a row many times, so they are stored.
    # Each block of rows reads the whole embedding: blocks should be small, but not too small.
    vocab = embedding.shape[0]
    rows = max(1, _TRUNCATED_BLOCKS * blocks.tokens * min(blocks.vocab, vocab) // vocab)
    whole = replace(blocks, tokens=rows, vocab=vocab)
    return by_block(whole, partial(_truncated, whole, truncation, *vocabulary), *by_position)


def _in_blocks(
    blocks: Blocks,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Samples in one pass over the vocabulary.

    Keeps the largest noisy score so far and the sum of exponentials for the log-prob.
    """
    hidden, keys, temperature, noise = by_position
    vocab = embedding.shape[0]
    size = min(blocks.vocab, vocab)
    aligned = vocab % TILE == 0 and size % TILE == 0
    offset = jax.lax.axis_index(VOCAB_AXES) * vocab

    def step(carry: Any, number: Int[Array, ""]) -> tuple[Any, None]:
        highest, total, best, token, sampled = carry
        _, scores, start = block_scores(blocks, hidden, embedding, forbidden, number)
        scores /= temperature[:, None]
        new = jnp.maximum(highest, scores.max(axis=-1))
        total = total * jnp.exp(highest - new) + jnp.exp(scores - new[:, None]).sum(axis=-1)
        noisy = gumbel_noise(keys, offset + start, size, aligned=aligned)
        found, at, score = _best(scores + noise[:, None] * noisy, scores)
        # The first of equal scores, as an argmax over the whole vocabulary.
        better = found > best
        token = jnp.where(better, offset + start + at, token)
        sampled = jnp.where(better, score, sampled)
        return (new, total, jnp.maximum(best, found), token, sampled), None

    zeros = jnp.zeros(len(hidden), jnp.float32)
    low = zeros + FORBIDDEN
    start = low, zeros, low - jnp.inf, jnp.zeros(len(hidden), jnp.int32), low
    carry, _ = jax.lax.scan(step, start, jnp.arange(count_blocks(blocks, embedding)))
    highest, total, best, token, sampled = carry
    overall = jax.lax.pmax(highest, VOCAB_AXES)
    log_z = overall + jnp.log(jax.lax.psum(total * jnp.exp(highest - overall), VOCAB_AXES))
    token, sampled = _best_of_shards(best, token, sampled)
    return token, sampled - log_z


def _truncated(
    blocks: Blocks,
    truncation: Truncation,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> SampledTokens:
    """Samples from the truncated distribution; `blocks` has one block of the vocabulary."""
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
    token, sampled = _best_of_shards(best, offset + at, score)
    return token, sampled - log_z, sampled - log_kept


def _best(
    noisy: Float[Array, "block part"], scores: Float[Array, "block part"]
) -> tuple[Float[Array, " block"], Int[Array, " block"], Float[Array, " block"]]:
    """The largest noisy score, its index, and the score at this index without noise."""
    at = noisy.argmax(axis=-1)
    found, score = (jnp.take_along_axis(x, at[:, None], axis=-1)[:, 0] for x in (noisy, scores))
    return found, at, score


def _best_of_shards(
    best: Float[Array, " block"], token: Int[Array, " block"], score: Float[Array, " block"]
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Over all shards of the vocabulary: the token with the best noisy score, and its score."""
    top = jax.lax.pmax(best, VOCAB_AXES)
    # NaN scores show in the log-prob; the token is an arbitrary one then.
    mine = (best == top) | jnp.isnan(top)
    chosen = jax.lax.pmin(jnp.where(mine, token, np.iinfo(np.int32).max), VOCAB_AXES)
    return chosen, jax.lax.pmax(jnp.where(token == chosen, score, -jnp.inf), VOCAB_AXES)
