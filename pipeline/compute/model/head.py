"""From hidden states to log-probs: the only module that computes logits; head_sample.py samples.

The distribution is the softmax over the vocabulary minus the forbidden tokens, of logits that are
soft-capped if the model does so and divided by the temperature; the same for sampler and learner.

`score` iterates over positions and vocabulary in blocks, forward and backward, with sums in
float32. The embedding is frozen: only the hidden states get a gradient, by a custom VJP that
recomputes the logits instead of storing them. Positions may be sharded over the batch axes of a
mesh and the vocabulary over fsdp and tp. Each block of positions is all-gathered along the fsdp
axis, because moving hidden states costs far less than moving the embedding, and the results of the
vocabulary shards are combined after each block. Logits exist for one block of positions and one
block of the vocabulary at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pipeline.compute.model.attention import soft_cap
from pipeline.compute.model.sharding import BATCH_AXES, FSDP, VOCAB_AXES, platform
from pipeline.compute.model.top_k import MOST, Columns, TopK

FORBIDDEN = -1e30
"""Score of a token that cannot be sampled; finite, so that no gradient becomes NaN."""
_GATHERED = 4096
"""Rows of the embedding that are gathered at a time, so that they stay in fast memory."""
MAX_SHIFT = 60.0
"""Largest difference between the maximum score and the shift of the exponentials: e**60 times the
vocabulary is far inside the range of float32, in both directions."""
_TOP_K_BLOCK = 256, 32_768
"""Positions and entries of the vocabulary of a block if the top k is wanted."""
_BY_COLUMNS = {"tpu"}
"""Kinds of devices that find the top k by `Columns`, in a pass of its own; on a CPU that takes 1.3
to 1.9 times as long as sorting each block, a GPU is not measured."""
_SORTED = 2048
"""Entries of the vocabulary that these sort at a time if `Columns` are not exact."""

TokenIds = tuple[Array, ...]
"""Targets, `tokens`, and optionally gathered tokens, `tokens k`; or values of the same shapes."""
Sums = tuple[Array, Array, Array]
"""Shift of the exponentials, their sum, and their sum weighted by the scores."""
Carry = tuple[Array, Array, Array, Array, Array]
"""Maximum score, `Sums` without the shift, scores and ids of the top k."""
Outputs = tuple[Array, Array, TokenIds, Array, Array]
"""log_z, entropy, scores of `TokenIds`, scores and ids of the top k; each by position."""


@dataclass(frozen=True)
class Head:
    """Distribution and block sizes.

    Attributes:
        softcap: bound of the logits; None: no soft cap.
        temperature: divides the logits.
        tokens: positions whose logits exist at a time, per device; the top k has its own blocks.
        vocab: entries of the vocabulary whose logits exist at a time, per device.
        mesh: devices; hidden states are sharded by row over its batch axes, the embedding over its
            vocabulary axes.
    """

    softcap: float | None
    temperature: float
    tokens: int
    vocab: int
    mesh: Mesh

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


@dataclass(frozen=True)
class Shard:
    """One device's entries of the vocabulary, inside `shard_map`.

    Attributes:
        head: distribution and block sizes.
        embedding: rows of its entries.
        forbidden: True for tokens that cannot be sampled.
    """

    head: Head
    embedding: Float[Array, "vocab embed"]
    forbidden: Bool[Array, " vocab"]

    @property
    def vocab(self) -> int:
        """Number of entries."""
        return self.embedding.shape[0]

    @property
    def block(self) -> int:
        """Entries in a block."""
        return min(self.head.vocab, self.vocab)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.vocab // self.block)

    def scores(
        self, hidden: Float[Array, "block embed"], number: Int[Array, ""]
    ) -> tuple[Float[Array, "part embed"], Float[Array, "block part"], Int[Array, ""]]:
        """Block `number`: its rows, the scores of its tokens, and the index of its first one."""
        vocab, size = self.vocab, self.block
        # The last block overlaps the one before it where blocks do not divide the vocabulary.
        start = jnp.minimum(number * size, vocab - size)
        rows = jax.lax.dynamic_slice_in_dim(self.embedding, start, size)
        left_out = jax.lax.dynamic_slice_in_dim(self.forbidden, start, size)
        if vocab % size:
            left_out |= start + jnp.arange(size) < number * size
        logits = jnp.einsum("td,vd->tv", hidden, rows, preferred_element_type=jnp.float32)
        return rows, jnp.where(left_out, FORBIDDEN, self.head.score(logits)), start

    def by_block(self, run: Callable[..., Any], *arrays: Any) -> Any:
        """Runs over blocks of positions; devices along the fsdp axis work on each together."""
        tokens = arrays[0].shape[0]
        most = min(max(1, self.head.tokens // jax.lax.axis_size(FSDP)), tokens)
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

    def local_rows(
        self, tokens: Int[Array, "block ..."]
    ) -> tuple[Int[Array, "block k"], Bool[Array, "block k"]]:
        """Row of each token in this device's embedding, and whether the token is in it."""
        at = _columns(tokens) - jax.lax.axis_index(VOCAB_AXES) * self.vocab
        return jnp.clip(at, 0, self.vocab - 1), (at >= 0) & (at < self.vocab)


def on_devices(
    head: Head,
    run: Callable[..., Any],
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    *by_position: Any,
) -> Any:
    """`run` in `shard_map`, as a function of a `Shard` and of arrays sharded by position."""

    def local(embedding: Array, forbidden: Array, *by_position: Any) -> Any:
        return run(Shard(head, embedding, forbidden), *by_position)

    by_entry, positions = PartitionSpec(VOCAB_AXES), PartitionSpec(BATCH_AXES)
    specs = (by_entry, by_entry, *(positions for _ in by_position))
    # Outputs are equal along tp because they are sums over it, which check_vma cannot infer.
    return jax.shard_map(
        local, mesh=head.mesh, in_specs=specs, out_specs=positions, check_vma=False
    )(embedding, forbidden, *by_position)


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


def scaled_logits(
    hidden: Float[Array, "*rows embed"],
    embedding: Float[Array, "vocab embed"],
    *,
    softcap: float | None,
    temperature: Float[Array, ""] | float,
    forbidden: Bool[Array, " vocab"],
) -> Float[Array, "*rows vocab"]:
    """Float32 logits, capped and divided by the temperature, forbidden tokens at `FORBIDDEN`."""
    logits = jnp.einsum("...d,vd->...v", hidden, embedding, preferred_element_type=jnp.float32)
    return jnp.where(forbidden, FORBIDDEN, soft_cap(logits, softcap) / temperature)


def score(
    hidden: Float[Array, "rows seq embed"],
    targets: Int[Array, "rows seq"],
    embedding: Float[Array, "vocab embed"],
    *,
    head: Head,
    forbidden: Bool[Array, " vocab"],
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
        gather_tokens: further tokens whose log-probs are returned, differentiable like those of
            the targets.
        top_k: number of most likely tokens to return.

    Raises:
        ValueError: if a device has fewer than `top_k` entries of the vocabulary.
    """
    here = embedding.shape[0] // math.prod(head.mesh.shape[axis] for axis in VOCAB_AXES)
    if top_k > here:
        raise ValueError(f"top_k = {top_k}, but a device has only {here} entries of the vocabulary")
    if top_k:
        tokens_at_once, vocab = _TOP_K_BLOCK
        head = replace(head, tokens=tokens_at_once, vocab=vocab)
    rows, seq = targets.shape
    selected: TokenIds = (targets,) if gather_tokens is None else (targets, gather_tokens)
    flat, *tokens = (x.reshape(rows * seq, *x.shape[2:]) for x in (hidden, *selected))
    found = _passes(head, top_k, embedding, forbidden, flat, tuple(tokens))
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
def _passes(
    head: Head,
    top_k: int,
    embedding: Float[Array, "vocab embed"],
    forbidden: Bool[Array, " vocab"],
    hidden: Float[Array, "tokens embed"],
    tokens: TokenIds,
) -> Outputs:
    """`_forward` on every device; log_z and the gathered scores have gradients."""
    return on_devices(head, partial(_forward, top_k), embedding, forbidden, hidden, tokens)


def _passes_forward(head: Head, top_k: int, *given: Any) -> tuple[Outputs, Any]:
    found = _passes(head, top_k, *given)
    log_z, _, gathered, *_ = found
    return found, (*given, log_z, gathered)


def _passes_backward(
    head: Head, _top_k: int, residuals: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[None, None, Float[Array, "tokens embed"], None]:
    d_log_z, _, d_gathered, *_ = grads
    return None, None, on_devices(head, _backward, *residuals, d_log_z, d_gathered), None


_passes.defvjp(_passes_forward, _passes_backward)


def _forward(
    top_k: int, shard: Shard, hidden: Float[Array, "tokens embed"], tokens: TokenIds
) -> Outputs:
    """One pass over the vocabulary for each block of positions."""

    def block(hidden: Float[Array, "block embed"], tokens: TokenIds) -> Outputs:
        gathered = gathered_scores(shard, hidden, tokens)
        log_z, entropy, values, ids = _whole_vocabulary(shard, hidden, top_k)
        return log_z, entropy, gathered, values, ids

    return shard.by_block(block, hidden, tokens)


def _backward(shard: Shard, *by_position: Any) -> Float[Array, "tokens embed"]:
    """Gradient of the hidden states.

    d log_z / d score of v is the probability of v, d gathered / d score of its token is 1.

    Args:
        shard: this device's entries.
        by_position: hidden states and tokens, as in `_forward`; log_z and gathered scores that
            `_forward` returned; the cotangents of these two.
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
            rows, scores, _ = shard.scores(hidden, number)
            grad = d_log_z[:, None] * jnp.exp(scores - log_z[:, None]) * shard.head.slope(scores)
            return total + jnp.einsum(
                "tv,vd->td", grad.astype(rows.dtype), rows, preferred_element_type=jnp.float32
            ), None

        total = jnp.zeros(hidden.shape, jnp.float32)
        total, _ = jax.lax.scan(step, total, jnp.arange(shard.count))
        d_scores = jax.tree.map(lambda d, score: d * shard.head.slope(score), d_gathered, gathered)
        total += _gathered_grad(d_scores, shard, tokens)
        return jax.lax.psum(total, VOCAB_AXES).astype(hidden.dtype)

    return shard.by_block(block, *by_position)


def _whole_vocabulary(
    shard: Shard, hidden: Float[Array, "block embed"], top_k: int
) -> tuple[Array, Array, Array, Array]:
    """log_z, entropy and top k."""
    by_columns = 0 < top_k <= MOST and platform(shard.head.mesh) in _BY_COLUMNS
    in_one_pass = 0 if by_columns else top_k
    if in_one_pass or shard.count == 1:
        highest, total, weighted, values, ids = _running_maximum(shard, hidden, in_one_pass)
    else:
        highest, total, weighted = _fixed_shift(shard, hidden)
        values = ids = jnp.zeros((hidden.shape[0], 0))
    if by_columns:
        values, ids = _top_k_by_columns(shard, hidden, top_k)
    overall = jax.lax.pmax(highest, VOCAB_AXES)
    shrink = jnp.exp(highest - overall)
    total, weighted = jax.lax.psum((total * shrink, weighted * shrink), VOCAB_AXES)
    log_z = overall + jnp.log(total)
    if top_k:
        ids += jax.lax.axis_index(VOCAB_AXES) * shard.vocab
        values, ids = _best(
            top_k,
            jax.lax.all_gather(values, VOCAB_AXES, axis=1, tiled=True),
            jax.lax.all_gather(ids, VOCAB_AXES, axis=1, tiled=True),
        )
    return log_z, log_z - weighted / total, values, ids


def _fixed_shift(shard: Shard, hidden: Float[Array, "block embed"]) -> Sums:
    """Sums of exponentials whose shift is the largest score of the first block.

    That is known before the pass, so that the compiler can sum in the epilogue of the matrix
    product and logits are never written, not even to fast memory: on TPU that halves the time of
    the pass. If the shift is too far from the largest score, the pass is repeated with a running
    maximum.
    """
    shift = shard.scores(hidden, jnp.int32(0))[1].max(axis=-1)

    def step(carry: Sums, number: Int[Array, ""]) -> tuple[Sums, None]:
        highest, total, weighted = carry
        _, scores, _ = shard.scores(hidden, number)
        masses = jnp.exp(jnp.minimum(scores - shift[:, None], MAX_SHIFT))
        total += masses.sum(axis=-1)
        weighted += (masses * scores).sum(axis=-1)
        return (jnp.maximum(highest, scores.max(axis=-1)), total, weighted), None

    zeros = jnp.zeros_like(shift)
    numbers = jnp.arange(shard.count)
    (highest, *sums), _ = jax.lax.scan(step, (zeros + FORBIDDEN, zeros, zeros), numbers)
    return jax.lax.cond(
        jnp.max(highest - shift) > MAX_SHIFT,
        lambda: _running_maximum(shard, hidden, 0)[:3],
        lambda: (shift, *sums),
    )


def _running_maximum(shard: Shard, hidden: Float[Array, "block embed"], k: int) -> Carry:
    """As `_fixed_shift`, with the running maximum as shift; also scores and ids of the top k."""
    tokens = hidden.shape[0]

    def step(carry: Carry, number: Int[Array, ""]) -> tuple[Carry, None]:
        highest, total, weighted, values, ids = carry
        _, scores, start = shard.scores(hidden, number)
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
    return jax.lax.scan(step, start, jnp.arange(shard.count))[0]


def _top_k_by_columns(
    shard: Shard, hidden: Float[Array, "block embed"], k: int
) -> tuple[Float[Array, "block k"], Int[Array, "block k"]]:
    """Scores and ids of the top k of this device's entries."""

    def step(columns: Columns, number: Int[Array, ""]) -> tuple[Columns, None]:
        _, scores, start = shard.scores(hidden, number)
        return columns.add(scores, start), None

    columns, _ = jax.lax.scan(step, Columns.empty(hidden.shape[0]), jnp.arange(shard.count))
    values, ids, is_exact = columns.highest(k)
    narrow = replace(shard, head=replace(shard.head, vocab=_SORTED))
    return jax.lax.cond(
        is_exact.all(),
        lambda: (values, ids),
        lambda: _running_maximum(narrow, hidden, k)[3:],
    )


def _best(
    k: int, values: Float[Array, "block some"], ids: Int[Array, "block some"]
) -> tuple[Float[Array, "block k"], Int[Array, "block k"]]:
    values, at = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, at, axis=-1)


def gathered_scores(
    shard: Shard, hidden: Float[Array, "block embed"], tokens: TokenIds
) -> TokenIds:
    """Scores of `tokens`, each from the device that has its row of the embedding."""

    def one(position: tuple[Array, Array, Array]) -> Float[Array, " k"]:
        hidden, at, here = position
        rows = shard.embedding[at]
        logits = jnp.einsum("d,pd->p", hidden, rows, preferred_element_type=jnp.float32)
        return jnp.where(here, shard.head.score(logits), 0.0)

    found = tuple(
        _batched_map(one, hidden, *shard.local_rows(ids)).reshape(ids.shape) for ids in tokens
    )
    return jax.lax.psum(found, VOCAB_AXES)


def _gathered_grad(grads: TokenIds, shard: Shard, tokens: TokenIds) -> Float[Array, "block embed"]:
    """This device's share of the gradient of the hidden states through the gathered scores."""

    def one(position: tuple[Array, Array, Array]) -> Float[Array, " embed"]:
        grads, at, here = position
        rows = shard.embedding[at]
        grads = jnp.where(here, grads, 0.0).astype(rows.dtype)
        return jnp.einsum("p,pd->d", grads, rows, preferred_element_type=jnp.float32)

    found = (
        _batched_map(one, _columns(grad), *shard.local_rows(ids))
        for grad, ids in zip(grads, tokens, strict=True)
    )
    return jax.tree.reduce(jnp.add, tuple(found))


def _columns(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def _batched_map(one: Callable[..., Array], *arrays: Array) -> Array:
    """Maps `one` over the positions of a block, in batches of about `_GATHERED` rows."""
    tokens, k = arrays[1].shape
    return jax.lax.map(one, arrays, batch_size=min(tokens, max(1, _GATHERED // k)))
