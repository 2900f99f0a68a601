"""Embedding lookup with an embedding sharded by vocabulary and tokens sharded by row.

By default XLA gives every device the embeddings of the whole batch, which grow with the number of
devices; here they exist for a block of positions at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pipeline.compute.model.sharding import BATCH_AXES, FSDP, TP, VOCAB_AXES, is_sharded

_POSITIONS = 2048
"""Positions per device and block; each takes `fsdp` rows of memory."""


def look_up(
    tokens: Int[Array, "rows seq"], embedding: Float[Array, "vocab embed"], *, mesh: Mesh | None
) -> Float[Array, "rows seq embed"]:
    """`embedding[tokens]`, exactly.

    A device looks up the tokens of all rows of its fsdp group in its shard, with zeros for tokens
    of other shards; a reduce-scatter over the group gives each device the sum for its own rows.

    Args:
        tokens: sharded by `sharding.by_row`, which divides `rows` evenly.
        embedding: sharded over `VOCAB_AXES`.
        mesh: the devices; with None or without sharded weights there is no communication.
    """
    if mesh is None or not is_sharded(mesh):
        return embedding[tokens]
    by_row, by_entry = PartitionSpec(BATCH_AXES), PartitionSpec(VOCAB_AXES)
    run = jax.shard_map(_on_each, mesh=mesh, in_specs=(by_row, by_entry), out_specs=by_row)
    return run(tokens, embedding)


def _on_each(
    tokens: Int[Array, "rows seq"], part: Float[Array, "part embed"]
) -> Float[Array, "rows seq embed"]:
    first = jax.lax.axis_index(VOCAB_AXES) * part.shape[0]

    def block(tokens: Int[Array, " block"]) -> Float[Array, "block embed"]:
        at = jax.lax.all_gather(tokens, FSDP) - first
        here = (at >= 0) & (at < part.shape[0])
        found = jnp.where(here[..., None], part[jnp.clip(at, 0, part.shape[0] - 1)], 0)
        # At most one summand is nonzero, so the sum is exact in any dtype.
        own = jax.lax.psum_scatter(found, FSDP, scatter_dimension=0)
        return jax.lax.psum(own, TP)

    flat = tokens.reshape(-1)
    count = -(-flat.size // _POSITIONS)
    size = -(-flat.size // count)
    blocks = jnp.pad(flat, (0, count * size - flat.size)).reshape(count, size)
    found = jax.lax.map(block, blocks).reshape(count * size, -1)
    return found[: flat.size].reshape(*tokens.shape, -1)
