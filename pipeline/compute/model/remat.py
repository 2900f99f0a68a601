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
        self, parts: Parts, run: Callable[..., jax.Array], *, gather: Callable[[Any], Any]
    ) -> Callable[..., jax.Array]:
        """A layer that computes one part of the batch after another.

        Args:
            parts: of the batch.
            run: the layer, a function of its adapter, its frozen parameters and arrays of one part,
                the first of which has a gradient.
            gather: all-gathers the frozen parameters; once for all parts, and again for the
                backward pass if the layer is recomputed.

        Returns:
            The same function of the arrays of all parts.
        """
        if self.policy == "offload":
            return partial(_offloaded, parts, run, gather)

        def on_parts(adapter: Any, base: Any, *arrays: Any) -> jax.Array:
            base = gather(base) if self.recomputes else base
            return parts.map(self.wrap(partial(run, adapter, base)), *arrays)

        return self.wrap_parts(on_parts)


def _offloaded(
    parts: Parts,
    run: Callable[..., jax.Array],
    gather: Callable[[Any], Any],
    adapter: Any,
    base: Any,
    x: jax.Array,
    *others: Any,
) -> jax.Array:
    """`Remat.layer_on_parts` with the layer's input in host memory until the backward pass.

    Each part is fetched inside the loop over parts. With an offloading policy of `jax.checkpoint`,
    XLA fetches the inputs of all layers at once at the start of the backward pass.
    """
    # Traced here: qwix adds LoRA to what is traced inside the model's call, and the backward pass
    # is traced after it.
    traced = jax.make_jaxpr(run)(adapter, base, *jax.tree.map(lambda x: x[0], (x, *others)))
    structure = jax.tree.structure(base)

    def on_part(learned: Any, frozen: Any, x: jax.Array, others: Any) -> jax.Array:
        (result,) = jaxpr_as_fun(traced)(*learned, *frozen, x, *others)
        return result

    def gathered(frozen: Any) -> Any:
        return jax.tree.leaves(gather(jax.tree.unflatten(structure, frozen)))

    @jax.custom_vjp
    def compute(learned: Any, frozen: Any, x: jax.Array, others: Any) -> jax.Array:
        return parts.map(partial(on_part, learned, gathered(frozen)), x, others)

    def forward(learned: Any, frozen: Any, x: jax.Array, others: Any) -> tuple[jax.Array, Any]:
        whole = gathered(frozen)

        def step(part: Any) -> tuple[jax.Array, jax.Array]:
            x, others = part
            return on_part(learned, whole, x, others), jax.device_put(x, jax.memory.Space.Host)

        result, offloaded = jax.lax.map(step, (x, others))
        return parts.constrain(result), (learned, frozen, offloaded, others)

    def backward(residuals: Any, grad: jax.Array) -> tuple[Any, None, jax.Array, None]:
        learned, frozen, offloaded, others = residuals
        whole = gathered(frozen)

        def step(total: Any, part: Any) -> tuple[Any, jax.Array]:
            offloaded, others, grad = part
            x = jax.device_put(offloaded, jax.memory.Space.Device)
            _, pull = jax.vjp(lambda learned, x: on_part(learned, whole, x, others), learned, x)
            for_learned, for_x = pull(grad)
            return jax.tree.map(jnp.add, total, for_learned), for_x

        zeros = jax.tree.map(jnp.zeros_like, learned)
        for_learned, for_x = jax.lax.scan(step, zeros, (offloaded, others, grad))
        return for_learned, None, parts.constrain(for_x), None

    compute.defvjp(forward, backward)
    return compute(*map(jax.tree.leaves, (adapter, base)), x, jax.tree.leaves(others))


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

    def map(self, run: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
        """Applies `run` to one part after another; the arrays are split."""
        if self.count == 1:
            return run(*jax.tree.map(lambda x: x[0], arrays))[None]
        return self.constrain(jax.lax.map(lambda part: run(*part), arrays))

    def constrain(self, x: jax.Array) -> jax.Array:
        """Constrains the sharding of a split array."""
        place = NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))
        return jax.lax.with_sharding_constraint(x, place)
