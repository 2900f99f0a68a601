"""Sampling from the head's distribution, noise included, in one pass over the vocabulary.

A token is drawn in two levels: a column, which is a group of tokens, by its share of the
distribution, then one of its tokens. Both are Gumbel-max samples, so that the result is an exact
sample of the distribution; the noise is drawn for the columns and for the tokens of one column, not
for the whole vocabulary.

A pass takes one token of every column at a time and adds it to the column's sum of exponentials. On
a TPU that is the epilogue of the matrix product: no value moves within a register, and logits are
not written. The scores of the drawn column are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from pipeline.compute.model.gumbel import TILE, gumbel_noise
from pipeline.compute.model.head import FORBIDDEN, Head, Shard, on_devices
from pipeline.compute.model.sharding import VOCAB_AXES
from pipeline.compute.model.truncation import Truncation, threshold

SampledTokens = tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]
"""Tokens, log-probs under the full distribution and under the truncated one."""
Sums = tuple[Float[Array, "ranges block columns"], Float[Array, "ranges block columns"]]
"""Of each column: its highest score, and the sum of its exponentials relative to that one."""

_TRUNCATED_BLOCKS = 4
"""Scores that exist at a time with truncation, as a multiple of those without."""
_RANGES = 8
"""Ranges of the vocabulary; a device has whole ones if their number of devices divides this one."""
_LANES = 128
"""Width of a TPU's registers; a large range has a multiple of it as columns."""
_MEMBERS = 32
"""Tokens of a column at most: fewer cost more noise, more cost more gathered rows."""
_TOGETHER = 8
"""Positions whose drawn columns are scored by one product; at most this many."""
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
        ValueError: if the devices of the vocabulary do not divide it into whole ranges.
    """
    rows = jnp.ones(len(hidden), jnp.float32)
    given = hidden, keys, rows / temperature, noise * rows
    head = replace(head, temperature=1.0)
    return on_devices(head, partial(_sample, truncation), embedding, forbidden, *given)


@dataclass(frozen=True)
class Columns:
    """Columns of a vocabulary, which do not depend on blocks or devices.

    Equal ranges of token ids are tables, filled row by row; a column of a table is one of the
    vocabulary's columns. The last row ends at the end of its range, so it may repeat tokens of the
    row before.

    Attributes:
        tokens: tokens of a range.
        count: columns of a range.
    """

    tokens: int
    count: int

    @classmethod
    def of(cls, vocab: int) -> Columns:
        """Single tokens if the vocabulary is small."""
        tokens = vocab // math.gcd(vocab, _RANGES)
        return cls(tokens, min(tokens, -(-tokens // (_MEMBERS * _LANES)) * _LANES))

    @property
    def members(self) -> int:
        """Rows of a table."""
        return -(-self.tokens // self.count)

    @property
    def repeats(self) -> bool:
        """Whether the last row repeats tokens."""
        return self.tokens % self.count > 0

    def first(self, row: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Place of a row's first token in its range."""
        return jnp.minimum(row * self.count, self.tokens - self.count)

    def row(
        self, by_token: Shaped[Array, "vocab ..."], row: Int[Array, ""]
    ) -> Shaped[Array, "ranges columns ..."]:
        """One row of each range."""
        tables = by_token.reshape(-1, self.tokens, *by_token.shape[1:])
        return jax.lax.dynamic_slice_in_dim(tables, self.first(row), self.count, axis=1)

    def is_repeated(
        self, row: Int[Array, "*rows"], column: Int[Array, "*columns"]
    ) -> Bool[Array, "*both"]:
        """Whether an earlier row has the token."""
        return self.first(row) + column % self.count < row * self.count

    def ids(self, column: Int[Array, " block"]) -> Int[Array, "block members"]:
        """The tokens of one column for each position."""
        start = column // self.count * self.tokens + column % self.count
        return start[:, None] + self.first(jnp.arange(self.members))


def _sample(truncation: Truncation | None, shard: Shard, *by_position: Any) -> SampledTokens:
    """On one device: hidden states, keys, 1 / temperature and scale of the noise, by position."""
    head, vocab = shard.head, shard.vocab
    columns = Columns.of(vocab * jax.lax.axis_size(VOCAB_AXES))
    if vocab % columns.tokens:
        raise ValueError(
            f"a device has {vocab} entries of the vocabulary, no multiple of {columns.tokens}; "
            f"shard it over a divisor of {_RANGES} devices"
        )
    if truncation is None:
        tokens, logprobs = shard.by_block(partial(_in_one_pass, shard, columns), *by_position)
        return tokens, logprobs, logprobs
    # The bisection for the threshold reads all scores of a row many times, so they are stored.
    # Each block of rows reads the whole embedding: blocks should be small, but not too small.
    rows = max(1, _TRUNCATED_BLOCKS * head.tokens * shard.block // vocab)
    whole = replace(shard, head=replace(head, tokens=rows, vocab=vocab))
    return whole.by_block(partial(_truncated, whole, truncation, columns), *by_position)


def _in_one_pass(
    shard: Shard, columns: Columns, *by_position: Any
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Samples in one pass over the vocabulary, and a look at the tokens of one column."""
    hidden, keys, scale, noise = by_position

    def scores_of(row: Int[Array, ""]) -> Float[Array, "ranges block columns"]:
        rows, left_out = (columns.row(x, row) for x in (shard.embedding, shard.forbidden))
        logits = jnp.einsum("td,rcd->rtc", hidden, rows, preferred_element_type=jnp.float32)
        scores = shard.head.score(logits) * scale[:, None]
        return jnp.where(left_out[:, None], FORBIDDEN, scores)

    sums = _sums(columns, scores_of)
    column, score = _best_column(sums, keys, noise)
    if columns.members == 1:
        return column, score - _log_sum(sums)
    ids = columns.ids(column)
    scores = _scores(shard, hidden, ids, scale)
    token, score = _member(columns, column, scores, keys, noise)
    # The score is computed again, and can be rounded otherwise than in the sum.
    return token, jnp.minimum(score - _log_sum(sums), 0.0)


def _scores(
    shard: Shard,
    hidden: Float[Array, "block embed"],
    ids: Int[Array, "block some"],
    scale: Float[Array, " block"],
) -> Float[Array, "block some"]:
    """Scores of some tokens of each position, from the devices that have them."""
    at, here = shard.local_rows(ids)
    rows = shard.embedding[at]
    # A matrix product for several positions, of which each takes its own part: a TPU has no fast
    # product of a vector and a matrix.
    together = math.gcd(len(hidden), _TOGETHER)
    products = jnp.einsum(
        "gtd,gskd->gtsk",
        hidden.reshape(-1, together, hidden.shape[1]),
        rows.reshape(-1, together, *rows.shape[1:]),
        preferred_element_type=jnp.float32,
    )
    own = jnp.eye(together, dtype=bool)[:, :, None]
    logits = jnp.where(own, products, 0.0).sum(axis=2).reshape(ids.shape)
    scores = shard.head.score(logits) * scale[:, None]
    scores = jnp.where(shard.forbidden[at], FORBIDDEN, scores)
    return jax.lax.psum(jnp.where(here, scores, 0.0), VOCAB_AXES)


def _truncated(
    shard: Shard, truncation: Truncation, columns: Columns, *by_position: Any
) -> SampledTokens:
    """Samples from the truncated distribution; the vocabulary is one block."""
    hidden, keys, scale, noise = by_position
    _, scores, _ = shard.scores(hidden, jnp.int32(0))
    scores = jnp.where(shard.forbidden, FORBIDDEN, scores * scale[:, None])
    allowed = scores >= threshold(scores, truncation=truncation)[:, None]
    kept = jnp.where(allowed, scores, FORBIDDEN)

    def sums_of(scores: Float[Array, "block vocab"]) -> Sums:
        of_row = jax.vmap(columns.row, in_axes=(0, None), out_axes=1)
        return _sums(columns, partial(of_row, scores))

    sums = sums_of(kept)
    column, _ = _best_column(sums, keys, noise)
    at, here = shard.local_rows(columns.ids(column))
    found = jnp.where(here, jnp.take_along_axis(kept, at, axis=-1), 0.0)
    found = jax.lax.psum(found, VOCAB_AXES)
    token, score = _member(columns, column, found, keys, noise)
    return token, score - _log_sum(sums_of(scores)), score - _log_sum(sums)


def _sums(
    columns: Columns, scores_of: Callable[[Int[Array, ""]], Float[Array, "ranges block columns"]]
) -> Sums:
    """Adds up the columns of this device, given the scores of a row of its tables."""

    def add(row: Int[Array, ""], sums: Sums) -> Sums:
        highest, masses = sums
        scores = scores_of(row)
        if columns.repeats:
            is_repeated = columns.is_repeated(row, jnp.arange(columns.count))
            scores = jnp.where(is_repeated, FORBIDDEN, scores)
        ratio = jnp.exp(-jnp.abs(scores - highest))
        masses = jnp.where(scores > highest, masses * ratio + 1.0, masses + ratio)
        return jnp.maximum(highest, scores), masses

    none = jnp.zeros(jax.eval_shape(scores_of, jnp.int32(0)).shape)
    return jax.lax.fori_loop(0, columns.members, add, (none + FORBIDDEN, none))


def _log_sum(sums: Sums) -> Float[Array, " block"]:
    """Log-sum-exp of all scores of all devices."""
    highest, masses = sums
    overall = jax.lax.pmax(highest.max(axis=(0, 2)), VOCAB_AXES)
    total = (masses * jnp.exp(highest - overall[:, None])).sum(axis=(0, 2))
    return overall + jnp.log(jax.lax.psum(total, VOCAB_AXES))


def _best_column(
    sums: Sums, keys: UInt32[Array, "block 2"], noise: Float[Array, " block"]
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Draws a column of all devices, without noise that of the highest score; its highest score."""
    highest, masses = sums
    ranges, _, count = highest.shape
    first = count * (ranges * jax.lax.axis_index(VOCAB_AXES) + jnp.arange(ranges))
    shares = highest + jnp.where(noise[:, None] > 0, jnp.log(masses), 0.0)
    noisy = shares + noise[:, None] * _column_noise(keys, first, count)
    best = jax.lax.pmax(noisy.max(axis=(0, 2)), VOCAB_AXES)[:, None]
    # NaN scores show in the log-prob; the column is an arbitrary one then.
    numbers = jnp.where(
        (noisy == best) | jnp.isnan(best),
        first[:, None, None] + jnp.arange(count),
        np.iinfo(np.int32).max,
    )
    column = jax.lax.pmin(numbers.min(axis=(0, 2)), VOCAB_AXES)
    score = jnp.where(numbers == column[:, None], highest, -jnp.inf).max(axis=(0, 2))
    return column, jax.lax.pmax(score, VOCAB_AXES)


def _column_noise(
    keys: UInt32[Array, "block 2"], first: Int[Array, " ranges"], count: int
) -> Float[Array, "ranges block columns"]:
    """Noise of the columns of adjacent ranges, of which each begins with column `first`."""
    if count % TILE == 0:
        return jax.vmap(partial(gumbel_noise, keys, size=count, aligned=True))(first)
    # All ranges together may be aligned, which halves the work.
    size = len(first) * count
    noise = gumbel_noise(keys, first[0], size, aligned=size % TILE == 0)
    return noise.reshape(len(keys), len(first), count).swapaxes(0, 1)


def _member(
    columns: Columns,
    column: Int[Array, " block"],
    scores: Float[Array, "block members"],
    keys: UInt32[Array, "block 2"],
    noise: Float[Array, " block"],
) -> tuple[Int[Array, " block"], Float[Array, " block"]]:
    """Draws one of the tokens of a column; also returns its score."""
    is_repeated = columns.is_repeated(jnp.arange(columns.members), column[:, None])
    scores = jnp.where(is_repeated, FORBIDDEN, scores)
    noisy = scores + noise[:, None] * gumbel_noise(keys, _FIRST_MEMBER, columns.members)
    at = noisy.argmax(axis=-1)[:, None]
    token, score = (jnp.take_along_axis(x, at, axis=-1) for x in (columns.ids(column), scores))
    return token[:, 0], score[:, 0]
