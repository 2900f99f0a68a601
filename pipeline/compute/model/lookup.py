"""Embedding lookup with tokens sharded by row, in an embedding that is sharded or in host memory.

Sharded by vocabulary: by default XLA gives every device the embeddings of the whole batch, which
grow with the number of devices; here they exist for a block of positions at a time.

In host memory: each device copies the rows of its own tokens. XLA gathers from host memory only on
the host's processor, which waits for the device and the device for it.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from pipeline.compute.model.sharding import BATCH_AXES, TP, VOCAB_AXES

_POSITIONS = 2048
"""Positions per device and block; each takes a row of memory for every device of its group."""
_NUMBERS = 2048 * 2560
"""Most numbers per device and block."""
_COPIES = 8
"""Rows that are copied from host memory at the same time."""


def look_up(
    tokens: Int[Array, "rows seq"],
    embedding: Float[Array, "vocab embed"],
    *,
    mesh: Mesh,
    axes: tuple[str, ...] = VOCAB_AXES,
) -> Float[Array, "rows seq embed"]:
    """`embedding[tokens]`, exactly.

    A device looks up the tokens of all rows of its group in its shard, with zeros for tokens of
    other shards; a reduce-scatter over the group gives each device the sum for its own rows. A
    group has the devices of different rows that share an embedding: those along fsdp, or all.

    Args:
        tokens: sharded by `sharding.by_row`, which divides `rows` evenly.
        embedding: sharded over `axes`, if they divide its rows.
        mesh: the devices; without sharded entries there is no communication.
        axes: mesh axes, tp among them.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if parts == 1 or len(embedding) % parts:
        return embedding[tokens]
    by_row, by_entry = PartitionSpec(BATCH_AXES), PartitionSpec(axes)
    run = jax.shard_map(
        partial(_on_each, axes), mesh=mesh, in_specs=(by_row, by_entry), out_specs=by_row
    )
    return run(tokens, embedding)


def _on_each(
    axes: tuple[str, ...], tokens: Int[Array, "rows seq"], part: Float[Array, "part embed"]
) -> Float[Array, "rows seq embed"]:
    first = jax.lax.axis_index(axes) * part.shape[0]
    group = tuple(axis for axis in axes if axis != TP)

    def block(tokens: Int[Array, " block"]) -> Float[Array, "block embed"]:
        at = jax.lax.all_gather(tokens, group) - first
        here = (at >= 0) & (at < part.shape[0])
        found = jnp.where(here[..., None], part[jnp.clip(at, 0, part.shape[0] - 1)], 0)
        # At most one summand is nonzero, so the sum is exact in any dtype.
        own = jax.lax.psum_scatter(found, group, scatter_dimension=0)
        return jax.lax.psum(own, TP)

    flat = tokens.reshape(-1)
    count = -(-flat.size // min(_POSITIONS, max(1, _NUMBERS // part.shape[1])))
    size = -(-flat.size // count)
    blocks = jnp.pad(flat, (0, count * size - flat.size)).reshape(count, size)
    found = jax.lax.map(block, blocks).reshape(count * size, -1)
    return found[: flat.size].reshape(*tokens.shape, -1)


def look_up_in_host(
    tokens: Int[Array, "rows seq"], table: Float[Array, "vocab tiles lanes"], *, mesh: Mesh
) -> Float[Array, "rows seq padded"]:
    """`table[tokens]`, exactly, in the devices' memory.

    Args:
        tokens: sharded by `sharding.by_row`, which divides `rows` evenly.
        table: the result of `tiled` in host memory, whole for each device.
        mesh: the devices.
    """
    by_row = PartitionSpec(BATCH_AXES)
    run = jax.shard_map(_copied, mesh=mesh, in_specs=(by_row, PartitionSpec()), out_specs=by_row)
    return run(tokens, table)


def _copied(
    tokens: Int[Array, "rows seq"], table: Float[Array, "vocab tiles lanes"]
) -> Float[Array, "rows seq padded"]:
    def copy(_: None, token: Int[Array, ""]) -> tuple[None, Float[Array, "tiles lanes"]]:
        row = jax.lax.dynamic_index_in_dim(table, token, keepdims=False)
        return None, jax.device_put(row, jax.memory.Space.Device)

    _, found = jax.lax.scan(copy, None, tokens.reshape(-1), unroll=_COPIES)
    return found.reshape(*tokens.shape, -1)


def tiled(embedding: np.ndarray, row: tuple[int, int]) -> np.ndarray:
    """`vocab width` to `vocab *row`, with zeros at the end of each row."""
    padding = math.prod(row) - embedding.shape[1]
    return np.pad(embedding, ((0, 0), (0, padding))).reshape(-1, *row)


def untiled(table: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `tiled`."""
    return table.reshape(len(table), -1)[:, :width]
