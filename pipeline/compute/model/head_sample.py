"""Sampling from the head's distribution, noise included, in passes over the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pipeline.compute.model.gumbel import TILE, gumbel_noise
from pipeline.compute.model.head import FORBIDDEN, Head, Shard, on_devices
from pipeline.compute.model.sharding import VOCAB_AXES
from pipeline.compute.model.truncation import Truncation, threshold

SampledTokens = tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]
"""Tokens, log-probs under the full distribution and under the truncated one."""

_TRUNCATED_BLOCKS = 4
"""Scores that exist at a time with truncation, as a multiple of those without."""


def sample(
    hidden: Float[Array, "rows embed"],
    embedding: Float[Array, "vocab embed"],
    *,
    head: Head,
    forbidden: Bool[Array, " vocab"],
    keys: UInt32[Array, "rows 2"],
    temperature: Float[Array, ""],
    noise: Float[Array, ""],
    truncation: Truncation | None = None,
) -> SampledTokens:
    """Samples one token per row; its log-prob under the full and under the truncated distribution.

    Without truncation both log-probs are the same and one pass over the vocabulary suffices.

    Args:
        hidden: after the final norm.
        embedding: tied, `vocab embed`.
        head: the distribution except its temperature, and the block sizes.
        forbidden: True for tokens that cannot be sampled.
        keys: RNG key of each row at this position, see `gumbel.keys_at`.
        temperature: divides the logits.
        noise: 1.0 samples (Gumbel-max), 0.0 takes the most likely token.
        truncation: top-k, top-p and min-p; None: no truncation.
    """
    rows = jnp.ones(len(hidden), jnp.float32)
    given = hidden, keys, temperature * rows, noise * rows
    head = replace(head, temperature=1.0)
    return on_devices(head, partial(_sample, truncation), embedding, forbidden, *given)


def _sample(truncation: Truncation | None, shard: Shard, *by_position: Any) -> SampledTokens:
    """On one device: hidden states, keys, temperatures and scales of the noise, by position."""
    if truncation is None:
        tokens, logprobs = shard.by_block(partial(_in_blocks, shard), *by_position)
        return tokens, logprobs, logprobs
    # The bisection for the threshold reads all scores of a row many times, so they are stored.
    # Each block of rows reads the whole embedding: blocks should be small, but not too small.
    head, vocab = shard.head, shard.vocab
    rows = max(1, _TRUNCATED_BLOCKS * head.tokens * shard.block // vocab)
    whole = replace(shard, head=replace(head, tokens=rows, vocab=vocab))
    return whole.by_block(partial(_truncated, whole, truncation), *by_position)


def _in_blocks(
    shard: Shard, *by_position: Any
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Samples in one pass over the vocabulary.

    Keeps the largest noisy score so far and the sum of exponentials for the log-prob.
    """
    hidden, keys, temperature, noise = by_position
    vocab, size = shard.vocab, shard.block
    aligned = vocab % TILE == 0 and size % TILE == 0
    offset = jax.lax.axis_index(VOCAB_AXES) * vocab

    def step(carry: Any, number: Int[Array, ""]) -> tuple[Any, None]:
        highest, total, best, token, sampled = carry
        _, scores, start = shard.scores(hidden, number)
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
    carry, _ = jax.lax.scan(step, start, jnp.arange(shard.count))
    highest, total, best, token, sampled = carry
    overall = jax.lax.pmax(highest, VOCAB_AXES)
    log_z = overall + jnp.log(jax.lax.psum(total * jnp.exp(highest - overall), VOCAB_AXES))
    token, sampled = _best_of_shards(best, token, sampled)
    return token, sampled - log_z


def _truncated(shard: Shard, truncation: Truncation, *by_position: Any) -> SampledTokens:
    """Samples from the truncated distribution; the vocabulary is one block."""
    hidden, keys, temperature, noise = by_position
    vocab = shard.vocab
    offset = jax.lax.axis_index(VOCAB_AXES) * vocab
    _, scores, _ = shard.scores(hidden, jnp.int32(0))
    scores = jnp.where(shard.forbidden, FORBIDDEN, scores / temperature[:, None])
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
