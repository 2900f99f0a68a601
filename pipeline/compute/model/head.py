"""The head: the distribution of the next token, and passes over blocks of positions and vocabulary.

The distribution is the softmax over the vocabulary minus the forbidden tokens, of logits that are
soft-capped if the model does so and divided by the temperature; the same for sampler and learner.
Only head_score.py and head_sample.py compute logits.

Positions may be sharded over the batch axes of a mesh and the vocabulary over fsdp and tp. Each
block of positions is all-gathered along the fsdp axis, because moving hidden states costs far less
than moving the embedding, and the results of the vocabulary shards are combined after each block.
Logits exist for one block of positions and one block of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from pipeline.compute.model.attention import soft_cap
from pipeline.compute.model.sharding import BATCH_AXES, FSDP, VOCAB_AXES

FORBIDDEN = -1e30
"""Score of a token that cannot be sampled; finite, so that no gradient becomes NaN."""
MAX_SHIFT = 60.0
"""Largest difference between the maximum score and the shift of the exponentials: e**60 times the
vocabulary is far inside the range of float32, in both directions."""


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
        """Runs over blocks of positions; devices along the fsdp axis work on each together.

        Args:
            run: a function of a block of the arrays.
            arrays: by position.
        """
        tokens = jax.tree.leaves(arrays)[0].shape[0]
        size = self._block_size(tokens)
        count = -(-tokens // size)

        def split(x: Array) -> Array:
            rest = [(0, count * size - tokens), *((0, 0) for _ in x.shape[1:])]
            return jnp.pad(x, rest).reshape(count, size, *x.shape[1:])

        found = jax.lax.map(lambda block: _together(run, *block), jax.tree.map(split, arrays))
        return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:tokens], found)

    def at_learned(
        self,
        run: Callable[..., tuple[Any, Any]],
        learned: Bool[Array, " tokens"] | None,
        packed: Shaped[Array, "padded ..."],
        *arrays: Any,
    ) -> tuple[Any, Any]:
        """As `by_block` for the learned positions, in a loop whose length depends on their number.

        Args:
            run: a function of a block of `packed` and of the arrays, to a new block of `packed` and
                results.
            learned: positions to compute: the blocks that the device of the fsdp group with the
                most of them needs. None: all, in a loop of fixed length.
            packed: an array in packed order, see `pack`; each block is written over the old one, so
                that memory holds one such array.
            arrays: by position.

        Returns:
            `packed` with all computed blocks replaced, and the results by position, 0 where they
            are not learned.
        """
        tokens = jax.tree.leaves(arrays)[0].shape[0]
        size, positions = self._block_size(tokens), self._positions(learned, tokens)
        most = tokens if learned is None else jax.lax.pmax(jnp.sum(learned), FSDP)

        def block(packed: Array, start: Int[Array, ""]) -> tuple[Any, Any]:
            old = jax.lax.dynamic_slice_in_dim(packed, start, size)
            at = jax.lax.dynamic_slice_in_dim(positions, start, size)
            return _together(run, old, *jax.tree.map(lambda x: x[at], arrays))

        def step(number: Int[Array, ""], so_far: tuple[Any, Any]) -> tuple[Any, Any]:
            start = number * size
            return jax.tree.map(
                lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, 0),
                so_far,
                block(so_far[0], start),
            )

        empty = jax.tree.map(
            lambda x: jnp.zeros((len(positions), *x.shape[1:]), x.dtype),
            jax.eval_shape(block, packed, jnp.int32(0))[1],
        )
        packed, found = jax.lax.fori_loop(0, -(-most // size), step, (packed, empty))
        return packed, jax.tree.map(partial(unpack, learned, tokens), found)

    def pack(
        self, learned: Bool[Array, " tokens"] | None, x: Shaped[Array, "tokens ..."]
    ) -> Shaped[Array, "padded ..."]:
        """An array by position in packed order: learned positions first, in whole blocks.

        There is one more row, for the positions that are not learned; see `unpack`.
        """
        return x[self._positions(learned, len(x))]

    def _positions(
        self, learned: Bool[Array, " tokens"] | None, tokens: int
    ) -> Int[Array, " padded"]:
        """The position at each place of the packed order."""
        size = self._block_size(tokens)
        padded = -(-tokens // size) * size + 1
        if learned is None:
            return jnp.minimum(jnp.arange(padded), tokens - 1)
        return jnp.flatnonzero(learned, size=padded, fill_value=0)

    def _block_size(self, tokens: int) -> int:
        """Positions of this device in a block: equal blocks, none nearly all padding."""
        most = min(max(1, self.head.tokens // jax.lax.axis_size(FSDP)), tokens)
        return -(-tokens // -(-tokens // most))

    def local_rows(
        self, tokens: Int[Array, "block ..."]
    ) -> tuple[Int[Array, "block k"], Bool[Array, "block k"]]:
        """Row of each token in this device's embedding, and whether the token is in it."""
        at = tokens.reshape(tokens.shape[0], -1) - jax.lax.axis_index(VOCAB_AXES) * self.vocab
        return jnp.clip(at, 0, self.vocab - 1), (at >= 0) & (at < self.vocab)


def unpack(
    learned: Bool[Array, " tokens"] | None, tokens: int, packed: Shaped[Array, "padded ..."]
) -> Shaped[Array, "tokens ..."]:
    """By position, 0 where it is not learned, from the order of `Shard.pack`."""
    if learned is None:
        return packed[:tokens]
    zero = len(packed) - 1
    # Reading the zeros from a row costs less memory than writing them into the result.
    return packed.at[zero].set(0)[jnp.where(learned, jnp.cumsum(learned) - 1, zero)]


def _together(run: Callable[..., Any], *block: Any) -> Any:
    """Runs a block of all devices along the fsdp axis; each gets its own positions' results."""
    size = jax.tree.leaves(block)[0].shape[0]
    found = run(*jax.tree.map(lambda x: jax.lax.all_gather(x, FSDP, tiled=True), block))
    start = jax.lax.axis_index(FSDP) * size
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), found)


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
