"""Rematerialization: what a forward pass saves for the backward pass, and parts of a batch.

A layer computes a few rows of the batch at a time, so its temporaries do not grow with the batch;
there is still one backward pass through the layers for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.compute.model.sharding import BATCH_AXES, batch_shards


@dataclass(frozen=True)
class Remat:
    """What each layer saves for the backward pass, besides its parameters.

    Attributes:
        policy: `full`: its input (arXiv:1604.06174, with layers as segments); `offload`: its input,
            in host memory; `dots`: also the results of matrix products with parameters; `none`:
            everything, with no recomputation.
        layer_tokens: positions that a layer computes at a time, per device; at least one row.
    """

    policy: Literal["none", "dots", "full", "offload"]
    layer_tokens: int

    def wrap(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer with recomputation of everything that is not saved."""
        if self.policy == "none":
            return layer
        if self.policy == "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(layer, policy=policy)
        return jax.checkpoint(layer)

    @property
    def recomputes(self) -> bool:
        """Whether only a layer's input is saved."""
        return self.policy in {"full", "offload"}

    def wrap_parts(self, on_parts: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of all parts of a batch.

        Needed in addition to `wrap`, because the loop over parts would save a copy of its inputs;
        nothing inside the loop is computed a third time.
        """
        return jax.checkpoint(on_parts) if self.recomputes else on_parts

    def layer_on_parts(
        self, parts: Parts, run: Callable[..., Any], *, gather: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """A layer that computes one part of the batch after another.

        Args:
            parts: of the batch.
            run: the layer, a function of its adapter, its frozen parameters, its input, what it
                shares with other layers, and further arrays, each of one part; all but the frozen
                parameters and the further arrays have a gradient.
            gather: all-gathers the frozen parameters; once for all parts, and again for the
                backward pass if the layer is recomputed.

        Returns:
            The same function of the arrays of all parts.
        """
        if self.policy == "offload":
            return partial(_offloaded, parts, run, gather)

        def on_parts(adapter: Any, base: Any, *arrays: Any) -> Any:
            base = gather(base) if self.recomputes else base
            return parts.map(self.wrap(partial(run, adapter, base)), *arrays)

        return self.wrap_parts(on_parts)


def _offloaded(
    parts: Parts,
    run: Callable[..., Any],
    gather: Callable[[Any], Any],
    adapter: Any,
    base: Any,
    *arrays: Any,
) -> Any:
    """`Remat.layer_on_parts` with the layer's input in host memory until the backward pass.

    Each part is fetched inside the loop over parts. With an offloading policy of `jax.checkpoint`,
    XLA fetches the inputs of all layers at once at the start of the backward pass. What layers
    share stays on the devices.
    """
    # Traced here: qwix adds LoRA to what is traced inside the model's call, and the backward pass
    # is traced after it.
    x, shared, *others = arrays
    part = jax.tree.map(lambda x: x[0], arrays)
    traced, result = jax.make_jaxpr(run, return_shape=True)(adapter, base, *part)
    structure, result = jax.tree.structure(base), jax.tree.structure(result)

    def on_part(learned: Any, frozen: Any, x: jax.Array, shared: Any, others: Any) -> Any:
        found = jaxpr_as_fun(traced)(*learned, *frozen, x, *shared, *others)
        return jax.tree.unflatten(result, found)

    def gathered(frozen: Any) -> Any:
        return jax.tree.leaves(gather(jax.tree.unflatten(structure, frozen)))

    @jax.custom_vjp
    def compute(learned: Any, frozen: Any, x: jax.Array, shared: Any, others: Any) -> Any:
        return parts.map(partial(on_part, learned, gathered(frozen)), x, shared, others)

    def forward(
        learned: Any, frozen: Any, x: jax.Array, shared: Any, others: Any
    ) -> tuple[Any, Any]:
        whole = gathered(frozen)

        def step(part: Any) -> tuple[Any, jax.Array]:
            x, shared, others = part
            found = on_part(learned, whole, x, shared, others)
            return found, jax.device_put(x, jax.memory.Space.Host)

        found, offloaded = jax.lax.map(step, (x, shared, others))
        return parts.constrain(found), (learned, frozen, offloaded, shared, others)

    def backward(residuals: Any, grad: Any) -> tuple[Any, None, jax.Array, Any, None]:
        learned, frozen, offloaded, shared, others = residuals
        whole = gathered(frozen)

        def step(total: Any, part: Any) -> tuple[Any, Any]:
            offloaded, shared, others, grad = part
            x = jax.device_put(offloaded, jax.memory.Space.Device)

            def again(learned: Any, x: jax.Array, shared: Any) -> Any:
                return on_part(learned, whole, x, shared, others)

            _, pull = jax.vjp(again, learned, x, shared)
            for_learned, *for_arrays = pull(grad)
            return jax.tree.map(jnp.add, total, for_learned), for_arrays

        zeros = jax.tree.map(jnp.zeros_like, learned)
        for_learned, for_arrays = jax.lax.scan(step, zeros, (offloaded, shared, others, grad))
        for_x, for_shared = parts.constrain(for_arrays)
        return for_learned, None, for_x, for_shared, None

    compute.defvjp(forward, backward)
    return compute(
        *map(jax.tree.leaves, (adapter, base)), x, *map(jax.tree.leaves, (shared, others))
    )


@dataclass(frozen=True)
class Parts:
    """Rows of a batch in parts that a layer computes one after another.

    Each part has equally many rows of every device, so no row moves between devices.

    Attributes:
        count: number of parts.
        mesh: devices that the rows are sharded over.
    """

    count: int
    mesh: Mesh

    @staticmethod
    def of(rows: int, seq: int, *, tokens: int, mesh: Mesh) -> Parts:
        """The fewest parts with at most `tokens` positions per device, and at least one row."""
        local = rows // batch_shards(mesh)
        most = max(1, tokens // seq)
        together = max(size for size in range(1, local + 1) if local % size == 0 and size <= most)
        return Parts(local // together, mesh)

    def split(self, x: jax.Array) -> jax.Array:
        """`rows ...` to `parts rows/parts ...`."""
        shards = batch_shards(self.mesh)
        apart = x.reshape(shards, self.count, -1, *x.shape[1:]).swapaxes(0, 1)
        return self.constrain(apart.reshape(self.count, -1, *x.shape[1:]))

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        shards = batch_shards(self.mesh)
        apart = x.reshape(self.count, shards, -1, *x.shape[2:]).swapaxes(0, 1)
        return apart.reshape(-1, *x.shape[2:])

    def map(self, run: Callable[..., Any], *arrays: Any) -> Any:
        """Applies `run` to one part after another; the arrays are split."""
        if self.count == 1:
            found = run(*jax.tree.map(lambda x: x[0], arrays))
            return jax.tree.map(lambda x: x[None], found)
        return self.constrain(jax.lax.map(lambda part: run(*part), arrays))

    def constrain(self, arrays: Any) -> Any:
        """Constrains the sharding of split arrays."""
        place = NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place), arrays)
