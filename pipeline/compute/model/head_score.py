"""Log-probs, entropy and top k from the head's distribution, in passes over the vocabulary.

`score` iterates over positions and vocabulary in blocks, with sums in float32. The embedding is
frozen: only the hidden states get a gradient. If it is wanted, the pass also sums the mean row of
the embedding under the distribution, as attention sums its values (FlashAttention,
arXiv:2205.14135), and keeps the derivative of the targets' log-probs, the target's row less the
mean row. The backward pass then has nothing to compute again, and reads only the rows of the tokens
whose scores are used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from pipeline.compute.model.gathered import TokenIds, gathered_gradient, gathered_scores
from pipeline.compute.model.head import FORBIDDEN, MAX_SHIFT, Head, Shard, on_devices, unpack
from pipeline.compute.model.sharding import FSDP, VOCAB_AXES, batch_shards, platform
from pipeline.compute.model.top_k import MOST, Columns, TopK

_TOP_K_BLOCK = 256, 65_536
"""Positions and entries of the vocabulary of a block if the top k is wanted."""
_LEARNED_BLOCK = 512
"""Most positions of a device in a block if only some are learned."""
_BY_COLUMNS = {"tpu"}
"""Kinds of devices that find the top k by `Columns`; on a CPU that takes 1.3 to 1.9 times as long
as sorting each block, a GPU is not measured."""
_FIRST = 2048
"""Entries of the vocabulary that give the shift of the exponentials."""
_SORTED = 2048
"""Entries of the vocabulary that these sort at a time if `Columns` are not exact."""

Outputs = tuple[Array, Array, TokenIds, Array, Array]
"""log_z, entropy, scores of `TokenIds`, scores and ids of the top k; each by position."""


class MeanRow(NamedTuple):
    """Sums for the derivative of log_z by the hidden states: a mean of the embedding's rows.

    The factor of a row is its mass times the derivative of its score by its logit. In bfloat16 the
    factors are rounded, and `rounded` lets the rounding of a factor that dominates cancel out.

    Attributes:
        rows: of rounded factors x rows.
        rounded: of the rounded factors.
        exact: of the factors.
    """

    rows: Float[Array, "block embed"]
    rounded: Float[Array, " block"]
    exact: Float[Array, " block"]


class Sums(NamedTuple):
    """Sums over the vocabulary, float32; the mass of a token is e^(score - shift).

    Attributes:
        mass: of masses.
        weighted: of masses x scores.
        mean: None if it is not wanted.
    """

    mass: Float[Array, " block"]
    weighted: Float[Array, " block"]
    mean: MeanRow | None

    @staticmethod
    def empty(hidden: Float[Array, "block embed"], *, with_mean: bool) -> Sums:
        """Sums of nothing."""
        zeros = jnp.zeros(len(hidden), jnp.float32)
        rows = jnp.zeros(hidden.shape, jnp.float32)
        return Sums(zeros, zeros, MeanRow(rows, zeros, zeros) if with_mean else None)

    def scaled(self, factor: Float[Array, " block"]) -> Sums:
        """All sums times a factor for each position."""
        return jax.tree.map(lambda x: x * factor.reshape(-1, *(1 for _ in x.shape[1:])), self)

    def add(
        self, head: Head, scores: Float[Array, "block part"], rows: Array, *, shift: Array
    ) -> Sums:
        """With a block of the vocabulary, its scores and its rows of the embedding."""
        masses = jnp.exp(jnp.minimum(scores - shift[:, None], MAX_SHIFT))
        mean = self.mean
        if mean is not None:
            factors = masses * head.slope(scores)
            rounded = factors.astype(rows.dtype)
            product = jnp.einsum("tv,vd->td", rounded, rows, preferred_element_type=jnp.float32)
            mean = MeanRow(
                rows=mean.rows + product,
                rounded=mean.rounded + rounded.astype(jnp.float32).sum(axis=-1),
                exact=mean.exact + factors.sum(axis=-1),
            )
        weighted = self.weighted + (masses * scores).sum(axis=-1)
        return Sums(self.mass + masses.sum(axis=-1), weighted, mean)

    @property
    def mean_row(self) -> Float[Array, "block embed"] | None:
        """Derivative of log_z by the hidden states."""
        if self.mean is None:
            return None
        # All factors are 0 where the scores reach their bound.
        rounded = jnp.where(self.mean.rounded > 0, self.mean.rounded, 1.0)
        return self.mean.rows / rounded[:, None] * (self.mean.exact / self.mass)[:, None]


class Scores(NamedTuple):
    """Results of one pass over the vocabulary for each position; all in float32.

    Attributes:
        logprobs: of the targets.
        log_z: log-sum-exp of the scores.
        entropy: in nats; no gradient flows through it.
        gathered: log-probs of `gather_tokens`; None without them.
        top: the k most likely tokens, without a gradient; None for top_k = 0.
    """

    logprobs: Float[Array, "rows seq"]
    log_z: Float[Array, "rows seq"]
    entropy: Float[Array, "rows seq"]
    gathered: Float[Array, "rows seq k"] | None
    top: TopK | None


def in_blocks(head: Head, positions: int, *, top_k: int) -> Head:
    """The head with the block sizes of the top k, or of learned positions.

    Args:
        head: with the configured sizes.
        positions: of a device, learned or not.
        top_k: number of most likely tokens.
    """
    if top_k:
        tokens, vocab = _TOP_K_BLOCK
        return replace(head, tokens=tokens, vocab=vocab)
    # As many logits at a time, for fewer positions: the last block is half empty on average.
    most = min(head.tokens, positions)
    block = min(most, _LEARNED_BLOCK * head.mesh.shape[FSDP])
    return replace(head, tokens=block, vocab=head.vocab * most // block)


def score(
    hidden: Float[Array, "rows seq embed"],
    targets: Int[Array, "rows seq"],
    embedding: Float[Array, "vocab embed"],
    *,
    head: Head,
    forbidden: Bool[Array, " vocab"],
    learned: Bool[Array, "rows seq"] | None = None,
    gather_tokens: Int[Array, "rows seq k"] | None = None,
    top_k: int = 0,
) -> Scores:
    """Log-probs of targets and of further tokens in one pass over the vocabulary.

    The log-prob of a forbidden token is computed as if it were allowed, so `targets` and
    `gather_tokens` should not be forbidden.

    Args:
        hidden: after the final norm.
        targets: one token for each position.
        embedding: tied, `vocab embed`; it gets no gradient.
        head: the distribution and the block sizes.
        forbidden: True for tokens that cannot be sampled.
        learned: positions to compute; all results elsewhere are 0. None: all positions.
        gather_tokens: further tokens whose log-probs are returned, differentiable like those of
            the targets.
        top_k: number of most likely tokens to return; a device has as many entries.
    """
    rows, seq = targets.shape
    if learned is not None or top_k:
        head = in_blocks(head, rows * seq // batch_shards(head.mesh), top_k=top_k)
    selected: TokenIds = (targets,) if gather_tokens is None else (targets, gather_tokens)
    flat, *tokens = (x.reshape(rows * seq, *x.shape[2:]) for x in (hidden, *selected))
    mask = None if learned is None else learned.reshape(rows * seq)
    found = _passes(head, top_k, embedding, forbidden, mask, flat, tuple(tokens))
    log_z, entropy, (target, *gathered), values, ids = jax.tree.map(
        lambda x: x.reshape(rows, seq, *x.shape[1:]), found
    )
    fixed = jax.lax.stop_gradient
    return Scores(
        logprobs=target - log_z,
        log_z=log_z,
        entropy=fixed(entropy),
        gathered=gathered[0] - log_z[..., None] if gathered else None,
        top=TopK(fixed(values - log_z[..., None]), ids) if top_k else None,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _passes(head: Head, top_k: int, *given: Any) -> Outputs:
    """`_forward` on every device; log_z and the gathered scores have gradients.

    Args:
        head: distribution and block sizes.
        top_k: number of most likely tokens.
        given: embedding, forbidden tokens, learned positions, hidden states and `TokenIds`.
    """
    _, found = on_devices(head, partial(_forward, top_k, with_derivative=False), *given)
    return found


def _passes_forward(head: Head, top_k: int, *given: Any) -> tuple[Outputs, Any]:
    derivative, found = on_devices(head, partial(_forward, top_k, with_derivative=True), *given)
    embedding, forbidden, learned, _, tokens = given
    _, _, gathered, *_ = found
    return found, (embedding, forbidden, learned, tokens, gathered, derivative)


def _passes_backward(
    head: Head, _top_k: int, residuals: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[None, None, None, Float[Array, "tokens embed"], None]:
    d_log_z, _, d_gathered, *_ = grads
    found = on_devices(head, _backward, *residuals, (d_log_z, d_gathered))
    return None, None, None, found, None


_passes.defvjp(_passes_forward, _passes_backward)


def _forward(
    top_k: int,
    shard: Shard,
    learned: Bool[Array, " tokens"] | None,
    hidden: Float[Array, "tokens embed"],
    tokens: TokenIds,
    *,
    with_derivative: bool,
) -> tuple[Float[Array, "padded embed"], Outputs]:
    """One pass over the vocabulary for each block of positions.

    Returns:
        The derivative of the targets' log-probs by the hidden states, in their dtype and in packed
        order (`Shard.pack`), or the hidden states if it is not wanted; and the outputs.
    """

    def block(
        hidden: Float[Array, "block embed"], tokens: TokenIds
    ) -> tuple[Float[Array, "block embed"], Outputs]:
        gathered = gathered_scores(shard, hidden, tokens)
        log_z, entropy, values, ids, mean = _whole_vocabulary(
            shard, hidden, top_k, with_mean=with_derivative
        )
        found = log_z, entropy, gathered, values, ids
        if mean is None:
            return hidden, found
        target_row = _gradient(shard, (jnp.ones_like(log_z),), gathered[:1], tokens[:1])
        return (target_row - mean).astype(hidden.dtype), found

    return shard.at_learned(block, learned, shard.pack(learned, hidden), tokens)


def _backward(
    shard: Shard,
    learned: Bool[Array, " tokens"] | None,
    tokens: TokenIds,
    gathered: TokenIds,
    derivative: Float[Array, "padded embed"],
    grads: tuple[Float[Array, " tokens"], TokenIds],
) -> Float[Array, "tokens embed"]:
    """Gradient of the hidden states, summed in float32, in their dtype.

    The derivative of log_z is the target's row less `derivative`.

    Args:
        shard: this device's entries.
        learned: see `Shard.at_learned`.
        tokens: as in `_forward`.
        gathered: their scores.
        derivative: of the targets' log-probs, in packed order; the gradient is written over it.
        grads: cotangents of log_z and of `gathered`.
    """
    d_log_z, (d_target, *others) = grads
    through_scores = d_target + d_log_z, *others

    def block(
        derivative: Float[Array, "block embed"],
        tokens: TokenIds,
        gathered: TokenIds,
        d_log_z: Float[Array, " block"],
        through_scores: TokenIds,
    ) -> tuple[Float[Array, "block embed"], None]:
        found = _gradient(shard, through_scores, gathered, tokens)
        return (found - d_log_z[:, None] * derivative).astype(derivative.dtype), None

    gradient, _ = shard.at_learned(
        block, learned, derivative, tokens, gathered, d_log_z, through_scores
    )
    return unpack(learned, len(d_log_z), gradient)


def _gradient(
    shard: Shard, grads: TokenIds, gathered: TokenIds, tokens: TokenIds
) -> Float[Array, "block embed"]:
    """Gradient of the hidden states through the scores `gathered` of `tokens`, float32."""
    d_logits = jax.tree.map(lambda d, score: d * shard.head.slope(score), grads, gathered)
    return jax.lax.psum(gathered_gradient(shard, d_logits, tokens), VOCAB_AXES)


def _whole_vocabulary(
    shard: Shard, hidden: Float[Array, "block embed"], top_k: int, *, with_mean: bool
) -> tuple[Array, Array, Array, Array, Array | None]:
    """log_z, entropy, scores and ids of the top k, and the derivative of log_z."""
    by_columns = 0 < top_k <= MOST and platform(shard.head.mesh) in _BY_COLUMNS
    nothing = Sums.empty(hidden, with_mean=with_mean)
    if by_columns or (shard.count > 1 and not top_k):
        shift, sums, columns = _fixed_shift(shard, hidden, nothing, by_columns=by_columns)
        values, ids = _top_k_of(columns, shard, hidden, top_k)
    else:
        shift, sums, values, ids = _running_maximum(shard, hidden, nothing, top_k)
    overall = jax.lax.pmax(shift, VOCAB_AXES)
    sums = jax.lax.psum(sums.scaled(jnp.exp(shift - overall)), VOCAB_AXES)
    log_z = overall + jnp.log(sums.mass)
    if top_k and jax.lax.axis_size(VOCAB_AXES) > 1:
        ids += jax.lax.axis_index(VOCAB_AXES) * shard.vocab
        values, ids = _best(
            top_k,
            jax.lax.all_gather(values, VOCAB_AXES, axis=1, tiled=True),
            jax.lax.all_gather(ids, VOCAB_AXES, axis=1, tiled=True),
        )
    return log_z, log_z - sums.weighted / sums.mass, values, ids, sums.mean_row


def _fixed_shift(
    shard: Shard, hidden: Float[Array, "block embed"], nothing: Sums, *, by_columns: bool
) -> tuple[Float[Array, " block"], Sums, Columns | None]:
    """The shift of the exponentials, sums with it, and the columns if they are wanted.

    The shift is the largest score of a few tokens. That is known before the pass, so that the
    compiler can sum in the epilogue of the matrix product and logits are never written, not even to
    fast memory: on TPU that halves the time of the pass. If it is too far from the largest score,
    the sums are repeated with a running maximum.
    """
    few = replace(shard, head=replace(shard.head, vocab=_FIRST))
    shift = few.scores(hidden, jnp.int32(0))[1].max(axis=-1)

    def step(
        carry: tuple[Array, Sums], number: Int[Array, ""]
    ) -> tuple[tuple[Array, Sums], Columns | None]:
        highest, sums = carry
        rows, scores, start = shard.scores(hidden, number)
        sums = sums.add(shard.head, scores, rows, shift=shift)
        columns = None
        if by_columns:
            # Computed with a position in each lane: otherwise a TPU copies them.
            scores = with_layout_constraint(scores, Layout((1, 0)))
            columns = Columns.of(scores.T, start)
        return (jnp.maximum(highest, scores.max(axis=-1)), sums), columns

    start = jnp.full_like(shift, FORBIDDEN), nothing
    (highest, sums), columns = jax.lax.scan(step, start, jnp.arange(shard.count))
    shift, sums = jax.lax.cond(
        jnp.max(highest - shift) > MAX_SHIFT,
        lambda: _running_maximum(shard, hidden, nothing, 0)[:2],
        lambda: (shift, sums),
    )
    return shift, sums, None if columns is None else columns.merged()


def _running_maximum(
    shard: Shard, hidden: Float[Array, "block embed"], nothing: Sums, k: int
) -> tuple[Array, Sums, Array, Array]:
    """As `_fixed_shift`, with the running maximum as shift; also scores and ids of the top k."""
    tokens = hidden.shape[0]

    def step(
        carry: tuple[Array, Sums, Array, Array], number: Int[Array, ""]
    ) -> tuple[tuple[Array, Sums, Array, Array], None]:
        highest, sums, values, ids = carry
        rows, scores, start = shard.scores(hidden, number)
        new = jnp.maximum(highest, scores.max(axis=-1))
        sums = sums.scaled(jnp.exp(highest - new)).add(shard.head, scores, rows, shift=new)
        if k:
            found, at = jax.lax.top_k(scores, min(k, scores.shape[-1]))
            values, ids = _best(k, jnp.c_[values, found], jnp.c_[ids, at + start])
        return (new, sums, values, ids), None

    start = (
        jnp.full(tokens, FORBIDDEN, jnp.float32),
        nothing,
        jnp.full((tokens, k), -jnp.inf),
        jnp.zeros((tokens, k), jnp.int32),
    )
    return jax.lax.scan(step, start, jnp.arange(shard.count))[0]


def _top_k_of(
    columns: Columns | None, shard: Shard, hidden: Float[Array, "block embed"], k: int
) -> tuple[Float[Array, "block k"], Int[Array, "block k"]]:
    """Scores and ids of the top k of this device's entries; empty without columns."""
    if columns is None:
        return jnp.zeros((len(hidden), 0)), jnp.zeros((len(hidden), 0), jnp.int32)
    values, ids, is_exact = columns.highest(k)
    narrow = replace(shard, head=replace(shard.head, vocab=_SORTED))
    nothing = Sums.empty(hidden, with_mean=False)
    return jax.lax.cond(
        is_exact.all(),
        lambda: (values, ids),
        lambda: _running_maximum(narrow, hidden, nothing, k)[2:],
    )


def _best(
    k: int, values: Float[Array, "block some"], ids: Int[Array, "block some"]
) -> tuple[Float[Array, "block k"], Int[Array, "block k"]]:
    values, at = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, at, axis=-1)
