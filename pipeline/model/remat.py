"""What of a forward pass is kept for the backward pass, and how much of it exists at a time.

A layer works on a few rows of the batch after the other, so what it needs besides its input does
not grow with the batch; there is still one backward pass through the layers for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.model.sharding import BATCH_AXES, batch_shards

_INPUT = "layer_input"


@dataclass(frozen=True)
class Remat:
    """What is kept of each layer for the backward pass, besides its parameters.

    Attributes:
        policy: `full`: its input (arXiv:1604.06174, with layers as segments); `offload`: its input,
            in the host's memory; `dots`: also the results of matrix products with parameters;
            `none`: everything, nothing is computed twice.
        layer_tokens: positions that a layer computes at a time, on each device; at least a row.
    """

    policy: Literal["none", "dots", "full", "offload"]
    layer_tokens: int

    def wrap(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer with what is not kept computed again in the backward pass."""
        if self.policy == "none":
            return layer
        if self.policy == "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(layer, policy=policy)
        return jax.checkpoint(layer)

    @property
    def recomputes(self) -> bool:
        """Whether only a layer's input is kept."""
        return self.policy in {"full", "offload"}

    def wrap_parts(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer on all parts of a batch.

        Wrapped once more, because a loop would keep a copy of its inputs beside the layer's; inside
        the loop nothing is computed a third time.
        """
        return jax.checkpoint(layer) if self.recomputes else layer

    def wrap_all(self, layers: Callable[..., Any]) -> Callable[..., Any]:
        """All layers one after the other, with their inputs put away where that is asked for."""
        if self.policy != "offload":
            return layers
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(layers, policy=policy)


def mark_input(x: jax.Array) -> jax.Array:
    """Names a layer's input, so that `Remat.wrap_all` finds it."""
    return checkpoint_name(x, _INPUT)


@dataclass(frozen=True)
class Parts:
    """Rows of a batch in parts that a layer computes one after the other.

    Each part has equally many rows of every device, so no row moves.

    Attributes:
        count: how many parts.
        mesh: devices that the rows are sharded over.
    """

    count: int
    mesh: Mesh

    @staticmethod
    def of(rows: int, seq: int, *, tokens: int, mesh: Mesh) -> Parts:
        """The fewest parts of at most `tokens` positions a device, but at least of one row."""
        local = rows // batch_shards(mesh)
        most = max(1, tokens // seq)
        together = max(size for size in range(1, local + 1) if local % size == 0 and size <= most)
        return Parts(local // together, mesh)

    def split(self, x: jax.Array) -> jax.Array:
        """`rows ...` to `parts rows/parts ...`."""
        shards = batch_shards(self.mesh)
        apart = x.reshape(shards, self.count, -1, *x.shape[1:]).swapaxes(0, 1)
        return self._constrain(apart.reshape(self.count, -1, *x.shape[1:]))

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        shards = batch_shards(self.mesh)
        apart = x.reshape(self.count, shards, -1, *x.shape[2:]).swapaxes(0, 1)
        return apart.reshape(-1, *x.shape[2:])

    def map(self, run: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
        """`run` on one part after the other; the arrays are split."""
        if self.count == 1:
            return run(*jax.tree.map(lambda x: x[0], arrays))[None]
        return self._constrain(jax.lax.map(lambda part: run(*part), arrays))

    def _constrain(self, x: jax.Array) -> jax.Array:
        place = NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))
        return jax.lax.with_sharding_constraint(x, place)
