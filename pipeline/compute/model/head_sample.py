"""Sampling from the head's distribution, noise included, in passes over the vocabulary.

A token is drawn in two levels: a column, which is a group of tokens, by its share of the
distribution, then one of its tokens. Both are Gumbel-max samples, so that the result is an exact
sample of the distribution; the noise is drawn for the columns and for the tokens of one column, not
for the whole vocabulary. Columns depend on the size of the vocabulary alone, not on blocks or
devices: each of `_RANGES` equal ranges of token ids is a table with a row for each member of its
columns. Rows are added, so that no value moves within the registers of a TPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from pipeline.compute.model.gathered import gathered_scores
from pipeline.compute.model.gumbel import TILE, gumbel_noise
from pipeline.compute.model.head import FORBIDDEN, MAX_SHIFT, Head, Shard, on_devices
from pipeline.compute.model.sharding import VOCAB_AXES
from pipeline.compute.model.truncation import Truncation, threshold

SampledTokens = tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]
"""Tokens, log-probs under the full distribution and under the truncated one."""

_TRUNCATED_BLOCKS = 4
"""Scores that exist at a time with truncation, as a multiple of those without."""
_RANGES = 8
"""Ranges of the vocabulary; a device has whole ones if their number of devices divides this one."""
_LANES = 128
"""Width of a TPU's registers; that of a range's table is a multiple of it."""
_MOST_MEMBERS = 32
"""Tokens of a column: fewer cost more noise, more cost more gathered rows of the embedding."""
_FIRST_MEMBER = 2**30
"""The noise of a column's members is that of the numbers from here on, which no column has."""


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

    Without truncation both log-probs are the same and one pass over the vocabulary suffices. Of
    equal scores the first one of the first column is the most likely token.

    Args:
        hidden: after the final norm.
        embedding: tied, `vocab embed`.
        head: the distribution except its temperature, and the block sizes.
        forbidden: True for tokens that cannot be sampled.
        keys: RNG key of each row at this position, see `gumbel.keys_at`.
        temperature: divides the logits.
        noise: 1.0 samples, 0.0 takes the most likely token.
        truncation: top-k, top-p and min-p; None: no truncation.

    Raises:
        ValueError: if the devices of the vocabulary do not divide it into whole columns.
    """
    rows = jnp.ones(len(hidden), jnp.float32)
    given = hidden, keys, temperature * rows, noise * rows
    head = replace(head, temperature=1.0)
    return on_devices(head, partial(_sample, truncation), embedding, forbidden, *given)


@dataclass(frozen=True)
class Columns:
    """Columns of a vocabulary.

    Attributes:
        count: of a range.
        size: tokens of a column.
    """

    count: int
    size: int

    @classmethod
    def of(cls, vocab: int) -> Columns | None:
        """None if a vocabulary is small or cannot be divided evenly: each token is a column."""
        groups, rest = divmod(vocab, _RANGES * _LANES)
        if rest or groups == 1:
            return None
        size = max(size for size in range(1, _MOST_MEMBERS + 1) if groups % size == 0)
        return cls(groups // size * _LANES, size) if size > 1 else None

    @property
    def tokens(self) -> int:
        """Tokens of a range."""
        return self.count * self.size

    def ids(self, column: Int[Array, " block"]) -> Int[Array, "block size"]:
        """The tokens of one column for each position."""
        first = column // self.count * self.tokens + column % self.count
        return first[:, None] + self.count * jnp.arange(self.size)


def _sample(truncation: Truncation | None, shard: Shard, *by_position: Any) -> SampledTokens:
    """On one device: hidden states, keys, temperatures and scales of the noise, by position."""
    head, vocab = shard.head, shard.vocab
    columns = Columns.of(vocab * jax.lax.axis_size(VOCAB_AXES))
    if columns is not None and vocab % columns.tokens:
        raise ValueError(
            f"a device has {vocab} entries of the vocabulary, no multiple of {columns.tokens}; "
            f"shard it over a divisor of {_RANGES} devices"
        )
    if truncation is None:
        tokens, logprobs = shard.by_block(partial(_in_blocks, shard, columns), *by_position)
        return tokens, logprobs, logprobs
    # The bisection for the threshold reads all scores of a row many times, so they are stored.
    # Each block of rows reads the whole embedding: blocks should be small, but not too small.
    rows = max(1, _TRUNCATED_BLOCKS * head.tokens * shard.block // vocab)
    whole = replace(shard, head=replace(head, tokens=rows, vocab=vocab))
    return whole.by_block(partial(_truncated, whole, truncation, columns), *by_position)


class _Drawn(NamedTuple):
    """The tokens seen so far.

    Attributes:
        highest: score.
        total: sum of the exponentials of the scores minus a shift.
        best: largest noisy score of a column; without noise, score of a token.
        column: with this noisy score.
        score: largest one in this column.
    """

    highest: Float[Array, " block"]
    total: Float[Array, " block"]
    best: Float[Array, " block"]
    column: Int[Array, " block"]
    score: Float[Array, " block"]


def _in_blocks(
    shard: Shard, columns: Columns | None, *by_position: Any
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Samples in one pass over the vocabulary, and a look at the tokens of one column."""
    hidden, keys, temperature, noise = by_position
    offset = jax.lax.axis_index(VOCAB_AXES) * shard.vocab
    count, aligned = shard.count, shard.vocab % TILE == 0 and shard.block % TILE == 0
    if columns is not None:
        rows = max(n for n in range(1, columns.size + 1) if _fits(n, columns, shard.head.vocab))
        shard = replace(shard, head=replace(shard.head, vocab=rows * columns.count))
        count, aligned = shard.vocab // columns.tokens, columns.count % TILE == 0
    drawn_of = partial(_draw, keys=keys, noise=noise, aligned=aligned)

    def scores_of(number: Int[Array, ""]) -> tuple[Float[Array, "block part"], Int[Array, ""]]:
        _, scores, start = shard.scores(hidden, number)
        return scores / temperature[:, None], offset + start

    def draw(number: Int[Array, ""], shift: Float[Array, " block"]) -> _Drawn:
        """From a range, or from a block of columns of one token."""
        if columns is None:
            scores, first = scores_of(number)
            drawn = drawn_of(scores, scores, _masses(scores, shift), first)
        else:
            highest, masses = _range(columns, scores_of, number, shift)
            first = (offset // columns.tokens + number) * columns.count
            shares = jnp.where(noise[:, None] > 0, jnp.log(masses) + shift[:, None], highest)
            drawn = drawn_of(shares, highest, masses, first)
        return drawn

    def all_blocks(shift: Float[Array, " block"]) -> _Drawn:
        def step(before: _Drawn, number: Int[Array, ""]) -> tuple[_Drawn, None]:
            new = draw(number, shift)
            # The first of equal scores, as an argmax over all columns.
            better = new.best > before.best
            return _Drawn(
                highest=jnp.maximum(before.highest, new.highest),
                total=before.total + new.total,
                best=jnp.maximum(before.best, new.best),
                column=jnp.where(better, new.column, before.column),
                score=jnp.where(better, new.score, before.score),
            ), None

        zeros = jnp.zeros(len(hidden), jnp.float32)
        low = zeros + FORBIDDEN
        nothing = _Drawn(low, zeros, low - jnp.inf, zeros.astype(jnp.int32), low)
        return jax.lax.scan(step, nothing, jnp.arange(count))[0]

    scores, first = scores_of(jnp.int32(0))
    shift = scores.max(axis=-1)
    if shard.count == 1 and columns is None:
        drawn = drawn_of(scores, scores, _masses(scores, shift), first)
    else:
        # As in the head's pass: a shift known in advance, unless it is too far from the maximum.
        drawn = all_blocks(shift)
        shift, drawn = jax.lax.cond(
            jnp.max(drawn.highest - shift) > MAX_SHIFT,
            lambda: (drawn.highest, all_blocks(drawn.highest)),
            lambda: (shift, drawn),
        )
    overall = jax.lax.pmax(shift, VOCAB_AXES)
    log_z = overall + jnp.log(jax.lax.psum(drawn.total * jnp.exp(shift - overall), VOCAB_AXES))
    column, score = _best_of_shards(drawn.best, drawn.column, drawn.score)
    if columns is None:
        return column, score - log_z
    ids = columns.ids(column)
    (scores,) = gathered_scores(shard, hidden, (ids,))
    at, here = shard.local_rows(ids)
    left_out = jax.lax.psum(here & shard.forbidden[at], VOCAB_AXES) > 0
    scores = jnp.where(left_out, FORBIDDEN, scores / temperature[:, None])
    token, score = _member(ids, scores, keys, noise)
    # The score is computed again, and can be rounded otherwise than in the sum.
    return token, jnp.minimum(score - log_z, 0.0)


def _fits(rows: int, columns: Columns, most: int) -> bool:
    """Whether some rows of a range's table, at least one, are a block."""
    return columns.size % rows == 0 and (rows == 1 or rows * columns.count <= most)


def _range(
    columns: Columns,
    scores_of: Callable[[Int[Array, ""]], tuple[Array, Array]],
    number: Int[Array, ""],
    shift: Float[Array, " block"],
) -> tuple[Float[Array, "block columns"], Float[Array, "block columns"]]:
    """Largest score and sum of exponentials of the columns of a range."""
    blocks = columns.tokens // jax.eval_shape(scores_of, number)[0].shape[-1]

    def step(carry: tuple[Array, Array], block: Int[Array, ""]) -> tuple[Any, None]:
        highest, masses = carry
        scores, _ = scores_of(number * blocks + block)
        for row in jnp.split(scores, scores.shape[-1] // columns.count, axis=-1):
            highest, masses = jnp.maximum(highest, row), masses + _masses(row, shift)
        return (highest, masses), None

    zeros = jnp.zeros((len(shift), columns.count))
    return jax.lax.scan(step, (zeros + FORBIDDEN, zeros), jnp.arange(blocks))[0]


def _truncated(
    shard: Shard, truncation: Truncation, columns: Columns | None, *by_position: Any
) -> SampledTokens:
    """Samples from the truncated distribution; the vocabulary is one block."""
    hidden, keys, temperature, noise = by_position
    offset = jax.lax.axis_index(VOCAB_AXES) * shard.vocab
    _, scores, _ = shard.scores(hidden, jnp.int32(0))
    scores = jnp.where(shard.forbidden, FORBIDDEN, scores / temperature[:, None])
    allowed = scores >= threshold(scores, truncation=truncation)[:, None]
    highest = jax.lax.pmax(scores.max(axis=-1), VOCAB_AXES)
    kept = jnp.where(allowed, scores, -jnp.inf)
    mass, masses = (_masses(x, highest) for x in (scores, kept))
    log_z, log_kept = (
        highest + jnp.log(jax.lax.psum(x.sum(axis=-1), VOCAB_AXES)) for x in (mass, masses)
    )
    aligned = (shard.vocab if columns is None else columns.count) % TILE == 0
    drawn_of = partial(_draw, keys=keys, noise=noise, aligned=aligned)
    if columns is None:
        drawn = drawn_of(kept, kept, masses, offset)
        token, score = _best_of_shards(drawn.best, drawn.column, drawn.score)
    else:
        table = kept.reshape(len(kept), -1, columns.size, columns.count)
        flat = len(kept), -1
        best = table.max(axis=2).reshape(flat)
        masses = masses.reshape(table.shape).sum(axis=2).reshape(flat)
        shares = jnp.where(noise[:, None] > 0, jnp.log(masses) + highest[:, None], best)
        drawn = drawn_of(shares, best, masses, offset // columns.size)
        column, _ = _best_of_shards(drawn.best, drawn.column, drawn.score)
        ids = columns.ids(column)
        at, here = shard.local_rows(ids)
        found = jnp.where(here, jnp.take_along_axis(kept, at, axis=-1), 0.0)
        token, score = _member(ids, jax.lax.psum(found, VOCAB_AXES), keys, noise)
    return token, score - log_z, score - log_kept


def _masses(
    scores: Float[Array, "block part"], shift: Float[Array, " block"]
) -> Float[Array, "block part"]:
    return jnp.exp(jnp.minimum(scores - shift[:, None], MAX_SHIFT))


def _draw(
    shares: Float[Array, "block part"],
    highest: Float[Array, "block part"],
    masses: Float[Array, "block part"],
    first: Int[Array, ""],
    *,
    keys: UInt32[Array, "block 2"],
    noise: Float[Array, " block"],
    aligned: bool,
) -> _Drawn:
    """Draws one of consecutive columns, of which `first` is the first.

    Args:
        shares: to which the noise is added.
        highest: the largest score of each column.
        masses: sum of the exponentials of each column.
        first: number of the first column.
        keys: RNG key of each row at this position.
        noise: scale of the noise.
        aligned: see `gumbel_noise`.
    """
    noisy = shares + noise[:, None] * gumbel_noise(keys, first, shares.shape[-1], aligned=aligned)
    at = noisy.argmax(axis=-1)
    return _Drawn(
        highest=highest.max(axis=-1),
        total=masses.sum(axis=-1),
        best=_at(noisy, at),
        column=first + at,
        score=_at(highest, at),
    )


def _member(
    ids: Int[Array, "block size"],
    scores: Float[Array, "block size"],
    keys: UInt32[Array, "block 2"],
    noise: Float[Array, " block"],
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Draws one of some tokens; also returns its score."""
    noisy = scores + noise[:, None] * gumbel_noise(keys, _FIRST_MEMBER, ids.shape[-1])
    at = noisy.argmax(axis=-1)
    return _at(ids, at), _at(scores, at)


def _at(values: Shaped[Array, "block some"], at: Int[Array, " block"]) -> Shaped[Array, " block"]:
    return jnp.take_along_axis(values, at[:, None], axis=-1)[:, 0]


def _best_of_shards(
    best: Float[Array, " block"], column: Int[Array, " block"], score: Float[Array, " block"]
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Over all shards of the vocabulary: the column with the best noisy score, and its score."""
    top = jax.lax.pmax(best, VOCAB_AXES)
    # NaN scores show in the log-prob; the column is an arbitrary one then.
    mine = (best == top) | jnp.isnan(top)
    chosen = jax.lax.pmin(jnp.where(mine, column, np.iinfo(np.int32).max), VOCAB_AXES)
    return chosen, jax.lax.pmax(jnp.where(column == chosen, score, -jnp.inf), VOCAB_AXES)
