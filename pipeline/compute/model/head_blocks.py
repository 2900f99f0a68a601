"""The head's passes on one device: over blocks of positions, and within each over the vocabulary.

They run inside `shard_map` (see head.py): `hidden` is this device's shard of the positions,
`embedding` its shard of the vocabulary. Each block of positions is all-gathered along the fsdp
axis, because moving hidden states costs far less than moving the embedding, and the results of the
vocabulary shards are combined after each block. Logits exist for one block of positions and one
block of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline.compute.model.attention import soft_cap
from pipeline.compute.model.sharding import FSDP, VOCAB_AXES

FORBIDDEN = -1e30
"""Score of a token that cannot be sampled; finite, so that no gradient becomes NaN."""

_GATHERED = 4096
"""Rows of the embedding that are gathered at a time, so that they stay in fast memory."""


@dataclass(frozen=True)
class Blocks:
    """Transformation of logits to scores, and block sizes.

    Attributes:
        softcap: bound of the logits; None: no soft cap.
        temperature: divides the logits.
        tokens: positions in a block, over all devices along the fsdp axis.
        vocab: entries of the vocabulary in a block, per device.
        top_k: number of most likely tokens to return; 0: none.
        shards: devices along the fsdp axis.
    """

    softcap: float | None
    temperature: float
    tokens: int
    vocab: int
    top_k: int
    shards: int

    def score(self, logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Logits, soft-capped and divided by the temperature."""
        return soft_cap(logits, self.softcap) / self.temperature

    def slope(self, scores: Float[Array, "*shape"]) -> Float[Array, "*shape"] | float:
        """Derivative of `score`, as a function of its result."""
        if self.softcap is None:
            return 1.0 / self.temperature
        # Bounded below by 0: a forbidden token's score would give a huge negative slope.
        flatness = (scores * self.temperature / self.softcap) ** 2
        return jnp.maximum(1.0 - flatness, 0.0) / self.temperature


_MAX_SHIFT = 60.0
"""Largest difference between the maximum score and the shift of the exponentials: e**60 times the
vocabulary is far inside the range of float32, in both directions."""

TokenIds = tuple[Array, ...]
"""Targets, `tokens`, and optionally gathered tokens, `tokens k`; or values of the same shapes."""

Carry = tuple[Array, Array, Array, Array, Array]
"""Maximum score, sum of exponentials, sum of scores weighted by them, scores and ids of the top k;
over the blocks of the vocabulary so far."""

Outputs = tuple[Array, Array, TokenIds, Array, Array]
"""log_z, entropy, scores of `TokenIds`, scores and ids of the top k; each by position."""


def forward(
    blocks: Blocks,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    hidden: Float[Array, "tokens embed"],
    tokens: TokenIds,
) -> Outputs:
    """One pass over the vocabulary for each block of positions."""

    def block(hidden: Float[Array, "block embed"], tokens: TokenIds) -> Outputs:
        gathered = _gathered_scores(blocks, hidden, embedding, tokens)
        log_z, entropy, values, ids = _whole_vocabulary(blocks, hidden, embedding, forbidden)
        return log_z, entropy, gathered, values, ids

    return by_block(blocks, block, hidden, tokens)


def backward(
    blocks: Blocks,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> Float[Array, "tokens embed"]:
    """Gradient of the hidden states.

    d log_z / d score of v is the probability of v, d gathered / d score of its token is 1.

    Args:
        blocks: see `Blocks`.
        embedding: as in `forward`.
        forbidden: as in `forward`.
        by_position: hidden states and tokens, as in `forward`; log_z and gathered scores that
            `forward` returned; the cotangents of these two.
    """

    def block(
        hidden: Float[Array, "block embed"],
        tokens: TokenIds,
        log_z: Float[Array, " block"],
        gathered: TokenIds,
        d_log_z: Float[Array, " block"],
        d_gathered: TokenIds,
    ) -> Float[Array, "block embed"]:
        def step(
            total: Float[Array, "block embed"], number: Int[Array, ""]
        ) -> tuple[Float[Array, "block embed"], None]:
            rows, scores, _ = block_scores(blocks, hidden, embedding, forbidden, number)
            grad = d_log_z[:, None] * jnp.exp(scores - log_z[:, None]) * blocks.slope(scores)
            return total + jnp.einsum(
                "tv,vd->td", grad.astype(rows.dtype), rows, preferred_element_type=jnp.float32
            ), None

        total = jnp.zeros(hidden.shape, jnp.float32)
        total, _ = jax.lax.scan(step, total, jnp.arange(count_blocks(blocks, embedding)))
        d_scores = jax.tree.map(lambda d, score: d * blocks.slope(score), d_gathered, gathered)
        total += _gathered_grad(d_scores, embedding, tokens)
        return jax.lax.psum(total, VOCAB_AXES).astype(hidden.dtype)

    return by_block(blocks, block, *by_position)


def by_block(blocks: Blocks, run: Callable[..., Any], *arrays: Any) -> Any:
    """Runs over blocks of positions; devices along the fsdp axis work on each block together."""
    tokens = arrays[0].shape[0]
    most = min(max(1, blocks.tokens // blocks.shards), tokens)
    count = -(-tokens // most)
    # Blocks of equal size: otherwise the last one could be nearly all padding.
    size = -(-tokens // count)

    def together(block: Any) -> Any:
        found = run(*jax.tree.map(lambda x: jax.lax.all_gather(x, FSDP, tiled=True), block))
        start = jax.lax.axis_index(FSDP) * size
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), found)

    def split(x: Array) -> Array:
        rest = [(0, count * size - tokens), *((0, 0) for _ in x.shape[1:])]
        return jnp.pad(x, rest).reshape(count, size, *x.shape[1:])

    found = jax.lax.map(together, jax.tree.map(split, arrays))
    return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:tokens], found)


def count_blocks(blocks: Blocks, embedding: Float[Array, "vocab embed"]) -> int:
    """Number of blocks of the vocabulary."""
    return -(-embedding.shape[0] // min(blocks.vocab, embedding.shape[0]))


def block_scores(
    blocks: Blocks,
    hidden: Float[Array, "block embed"],
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    number: Int[Array, ""],
) -> tuple[Float[Array, "part embed"], Float[Array, "block part"], Int[Array, ""]]:
    """A block of the vocabulary, the scores of its tokens, and the id of its first one."""
    vocab = embedding.shape[0]
    size = min(blocks.vocab, vocab)
    # The last block overlaps the one before it where blocks do not divide the vocabulary.
    start = jnp.minimum(number * size, vocab - size)
    rows = jax.lax.dynamic_slice_in_dim(embedding, start, size)
    left_out = jax.lax.dynamic_slice_in_dim(forbidden, start, size)
    if vocab % size:
        left_out |= start + jnp.arange(size) < number * size
    logits = jnp.einsum("td,vd->tv", hidden, rows, preferred_element_type=jnp.float32)
    return rows, jnp.where(left_out, FORBIDDEN, blocks.score(logits)), start


def _whole_vocabulary(
    blocks: Blocks,
    hidden: Float[Array, "block embed"],
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
) -> tuple[Array, Array, Array, Array]:
    """log_z, entropy and top k."""
    vocabulary = embedding, forbidden
    if blocks.top_k or count_blocks(blocks, embedding) == 1:
        highest, total, weighted, values, ids = _running_maximum(blocks, hidden, *vocabulary)
    else:
        highest, total, weighted = _fixed_shift(blocks, hidden, *vocabulary)
        values = ids = jnp.zeros((hidden.shape[0], 0))
    overall = jax.lax.pmax(highest, VOCAB_AXES)
    shrink = jnp.exp(highest - overall)
    total, weighted = jax.lax.psum((total * shrink, weighted * shrink), VOCAB_AXES)
    log_z = overall + jnp.log(total)
    if blocks.top_k:
        ids += jax.lax.axis_index(VOCAB_AXES) * embedding.shape[0]
        values, ids = _best(
            blocks.top_k,
            jax.lax.all_gather(values, VOCAB_AXES, axis=1, tiled=True),
            jax.lax.all_gather(ids, VOCAB_AXES, axis=1, tiled=True),
        )
    return log_z, log_z - weighted / total, values, ids


def _fixed_shift(
    blocks: Blocks,
    hidden: Float[Array, "block embed"],
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
) -> tuple[Array, Array, Array]:
    """The shift of the exponentials, their sum, and their sum weighted by the scores.

    The shift is the largest score of the first block, known before the pass, so that the compiler
    can sum in the epilogue of the matrix product and logits are never written, not even to fast
    memory: on TPU that halves the time of the pass. If the shift is too far from the largest score,
    the pass is repeated with a running maximum.
    """
    shift = block_scores(blocks, hidden, embedding, forbidden, jnp.int32(0))[1].max(axis=-1)

    def step(
        carry: tuple[Array, Array, Array], number: Int[Array, ""]
    ) -> tuple[tuple[Array, Array, Array], None]:
        highest, total, weighted = carry
        _, scores, _ = block_scores(blocks, hidden, embedding, forbidden, number)
        masses = jnp.exp(jnp.minimum(scores - shift[:, None], _MAX_SHIFT))
        total += masses.sum(axis=-1)
        weighted += (masses * scores).sum(axis=-1)
        return (jnp.maximum(highest, scores.max(axis=-1)), total, weighted), None

    zeros = jnp.zeros_like(shift)
    numbers = jnp.arange(count_blocks(blocks, embedding))
    (highest, *sums), _ = jax.lax.scan(step, (zeros + FORBIDDEN, zeros, zeros), numbers)
    return jax.lax.cond(
        jnp.max(highest - shift) > _MAX_SHIFT,
        lambda: _running_maximum(blocks, hidden, embedding, forbidden)[:3],
        lambda: (shift, *sums),
    )


def _running_maximum(
    blocks: Blocks,
    hidden: Float[Array, "block embed"],
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
) -> Carry:
    """As `_fixed_shift`, with the running maximum as shift; also scores and ids of the top k."""
    tokens, k = hidden.shape[0], blocks.top_k

    def step(carry: Carry, number: Int[Array, ""]) -> tuple[Carry, None]:
        highest, total, weighted, values, ids = carry
        _, scores, start = block_scores(blocks, hidden, embedding, forbidden, number)
        new = jnp.maximum(highest, scores.max(axis=-1))
        masses = jnp.exp(scores - new[:, None])
        shrink = jnp.exp(highest - new)
        total = total * shrink + masses.sum(axis=-1)
        weighted = weighted * shrink + (masses * scores).sum(axis=-1)
        if k:
            found, at = jax.lax.top_k(scores, min(k, scores.shape[-1]))
            values, ids = _best(k, jnp.c_[values, found], jnp.c_[ids, at + start])
        return (new, total, weighted, values, ids), None

    zeros = jnp.zeros(tokens, jnp.float32)
    start = (
        zeros + FORBIDDEN,
        zeros,
        zeros,
        jnp.full((tokens, k), -jnp.inf),
        jnp.zeros((tokens, k), jnp.int32),
    )
    return jax.lax.scan(step, start, jnp.arange(count_blocks(blocks, embedding)))[0]


def _best(
    k: int, values: Float[Array, "block some"], ids: Int[Array, "block some"]
) -> tuple[Float[Array, "block k"], Int[Array, "block k"]]:
    values, at = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, at, axis=-1)


def _gathered_scores(
    blocks: Blocks,
    hidden: Float[Array, "block embed"],
    embedding: Float[Array, "vocab embed"],
    tokens: TokenIds,
) -> TokenIds:
    """Scores of `tokens`, each from the device that has its row of the embedding."""

    def one(position: tuple[Array, Array, Array]) -> Float[Array, " k"]:
        hidden, at, here = position
        rows = embedding[at]
        logits = jnp.einsum("d,pd->p", hidden, rows, preferred_element_type=jnp.float32)
        return jnp.where(here, blocks.score(logits), 0.0)

    found = tuple(
        _batched_map(one, hidden, *_local_rows(embedding, ids)).reshape(ids.shape) for ids in tokens
    )
    return jax.lax.psum(found, VOCAB_AXES)


def _gathered_grad(
    grads: TokenIds, embedding: Float[Array, "vocab embed"], tokens: TokenIds
) -> Float[Array, "block embed"]:
    """This device's share of the gradient of the hidden states through the gathered scores."""

    def one(position: tuple[Array, Array, Array]) -> Float[Array, " embed"]:
        grads, at, here = position
        rows = embedding[at]
        grads = jnp.where(here, grads, 0.0).astype(rows.dtype)
        return jnp.einsum("p,pd->d", grads, rows, preferred_element_type=jnp.float32)

    found = (
        _batched_map(one, _columns(grad), *_local_rows(embedding, ids))
        for grad, ids in zip(grads, tokens, strict=True)
    )
    return jax.tree.reduce(jnp.add, tuple(found))


def _local_rows(
    embedding: Float[Array, "vocab embed"], tokens: Int[Array, "block ..."]
) -> tuple[Int[Array, "block k"], Bool[Array, "block k"]]:
    """Row of each token in this device's embedding, and whether the token is in it."""
    vocab = embedding.shape[0]
    at = _columns(tokens) - jax.lax.axis_index(VOCAB_AXES) * vocab
    return jnp.clip(at, 0, vocab - 1), (at >= 0) & (at < vocab)


def _columns(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def _batched_map(one: Callable[..., Array], *arrays: Array) -> Array:
    """Maps `one` over the positions of a block, in batches of about `_GATHERED` rows."""
    tokens, k = arrays[1].shape
    return jax.lax.map(one, arrays, batch_size=min(tokens, max(1, _GATHERED // k)))
