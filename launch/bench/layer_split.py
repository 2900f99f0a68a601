"""The layers in stages, one on each device, as a study for `launch.bench mesh`.

GPipe (arXiv:1811.06965) over `shard_map`: micro-batches go from stage to stage with `ppermute`; one
micro-batch is a sequential layer split. In every slot of time every device computes, in the bubble
what nobody uses. Embedding and head are sharded over the vocabulary as by tensor parallelism, whose
mesh axis is that of the stages, so that all stages have the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pipeline.compute.decode.cache import TokenAttention
from pipeline.compute.model import lora
from pipeline.compute.model.architecture import Architecture
from pipeline.compute.model.attention import Attend, LayerCache, attend_causally
from pipeline.compute.model.gumbel import keys_at
from pipeline.compute.model.head import Head
from pipeline.compute.model.head_sample import sample
from pipeline.compute.model.layer import LayerInputs, make_layer, norm_factor, run_layer
from pipeline.compute.model.lookup import look_up
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.remat import Remat
from pipeline.compute.model.sharding import TP as STAGE
from pipeline.compute.model.sharding import placed, replicated

_LAYERS = "layers."
_BY_STAGE, _WHOLE = PartitionSpec(STAGE), PartitionSpec()


class Block(nnx.Module):
    """One layer as a model of its own, because qwix adds LoRA inside the call of a model."""

    def __init__(self, architecture: Architecture, mesh: jax.sharding.Mesh) -> None:
        self.architecture, self.mesh, self.attaching = architecture, mesh, False
        self.layers = nnx.List([make_layer(architecture, 0, rngs=nnx.Rngs(0))])

    def __call__(
        self,
        x: Array,
        positions: Array,
        *,
        attend: Attend = jax.tree_util.Partial(attend_causally),  # noqa: B008  # a constant
        cache: LayerCache = None,
    ) -> tuple[Array, LayerCache]:
        """Hidden states after the layer, and its new cache; `lora.attach` gives it tokens."""
        if self.attaching:
            x = jnp.zeros((*x.shape, self.architecture.shape.embed))
        inputs = LayerInputs(positions, None, attend)
        x, _, cache = run_layer(
            self.layers[0], x, None, inputs, architecture=self.architecture, cache=cache
        )
        return x, cache


@dataclass(frozen=True, eq=False)
class LayerSplit(Policy):
    """A Gemma 2 or 3 whose layers are split over the mesh axis tp, for `LearnerPrograms`.

    Parameters named `layers.INDEX.` are those of this layer of each stage, `stages ...`, with zeros
    where the last stages have fewer layers. Sequences must not be longer than the sliding window,
    and RoPE must not be scaled: local and global layers then differ in its base only. A batch is
    divided into `micro_batches`, which must divide its rows.
    """

    micro_batches: int = 1
    _block: tuple[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Adds the stacked shapes."""
        super().__post_init__()
        block = nnx.eval_shape(lambda: Block(self.architecture, self.mesh))
        block = nnx.eval_shape(partial(lora.attach, lora=self.lora), block)
        vars(self).update(
            base_shapes=jax.eval_shape(self.stack, dict(self.base_shapes)),
            adapter_shapes=jax.eval_shape(self.stack, dict(self.adapter_shapes)),
            _block=nnx.split(block),
        )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.mesh.shape[STAGE]

    @property
    def by_stage(self) -> NamedSharding:
        """The leading axis (`stages`) is sharded."""
        return NamedSharding(self.mesh, _BY_STAGE)

    @property
    def depth(self) -> int:
        """Layers of a stage."""
        return -(-self.architecture.shape.layers // self.stages)

    def stack(self, params: Params) -> Params:
        """Base or adapter parameters of a `Policy` by stage."""
        layers, first = self.architecture.shape.layers, f"{_LAYERS}0."
        found = {name: x for name, x in params.items() if name not in _of_layers(params)}
        names = [name.removeprefix(first) for name in params if name.startswith(first)]
        for index, name in product(range(self.depth), names):
            zeros = jnp.zeros_like(params[first + name])
            numbers = range(index, self.depth * self.stages, self.depth)
            found[f"{_LAYERS}{index}.{name}"] = jnp.stack(
                [params[f"{_LAYERS}{n}.{name}"] if n < layers else zeros for n in numbers]
            )
        return found

    def abstract_params(self) -> tuple[Params, Params]:
        """See `Policy.abstract_params`; the base's layers are sharded over the stages."""
        layers = _of_layers(self.base_shapes)
        others = {name: x for name, x in self.base_shapes.items() if name not in layers}
        base = placed(others, self.mesh) | _with_sharding(layers, self.by_stage)
        return base, _with_sharding(self.adapter_shapes, replicated(self.mesh))

    def bind(self, base: Params, adapter: Params, **_: Any) -> Any:
        """The model as a function with the arguments and results of `Gemma.__call__`."""
        return partial(self._hidden, base, adapter)

    def decode(
        self,
        base: Params,
        adapter: Params,
        last: Int[Array, " slots"],
        start: Int[Array, " slots"],
        rings: Sequence[tuple[Array, Array]],
        *,
        head: Head,
        steps: int,
    ) -> Int[Array, "slots steps"]:
        """Decodes `steps` tokens in each slot, the most likely ones, with a loop on the devices.

        Unlike `DecodePrograms.segment` it does not copy the new positions to the rings at its end.
        The rings hold keys and values, `stages slots kv_heads ring head_dim`, of the `start`
        positions before `last`, the newest token of each slot.
        """
        keys, one = jnp.zeros((len(last), 2), jnp.uint32), jnp.float32(1)
        ring = rings[0][0]
        recent = jnp.zeros((*ring.shape[:3], steps, ring.shape[4]), ring.dtype)
        recent = jax.lax.with_sharding_constraint(recent, self.by_stage)

        def step(number: Array, state: Any) -> Any:
            last, tokens, recent = state
            at = start + number
            hidden, recent = self._hidden(
                base,
                adapter,
                last[:, None],
                at[:, None],
                attend=TokenAttention(start, at, number),
                caches=(rings, recent),
            )
            last, *_ = sample(
                hidden[:, 0],
                self.embedding(base),
                head=head,
                forbidden=jnp.zeros(self.vocab_size, bool),
                keys=keys_at(keys, at),
                temperature=one,
                noise=0 * one,
            )
            return last, tokens.at[:, number].set(last), recent

        tokens, empty = jnp.zeros((len(last), steps), jnp.int32), self.depth * [(recent, recent)]
        return jax.lax.fori_loop(0, steps, step, (last, tokens, empty))[1]

    def _hidden(
        self,
        base: Params,
        adapter: Params,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        *,
        attend: Attend,
        caches: Any = (None, None),
        remat: Remat | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Any]:
        del remat  # a layer saves its input only
        x = look_up(tokens, self.embedding(base), mesh=self.mesh)
        x *= jnp.sqrt(x.shape[-1]).astype(x.dtype)
        weights = _of_layers(base), adapter
        run = jax.shard_map(
            self._pipeline,
            mesh=self.mesh,
            in_specs=(_BY_STAGE, _WHOLE, _WHOLE, _BY_STAGE),
            out_specs=(_WHOLE, _BY_STAGE),
            check_vma=False,
        )
        x, recent = run((*weights, self._ropes()), x, (positions, attend), caches)
        unit = x.astype(jnp.float32)
        unit *= jax.lax.rsqrt(jnp.mean(jnp.square(unit), axis=-1, keepdims=True) + 1e-6)
        factor = norm_factor(base["final_norm.scale"], self.architecture.shape)
        return (unit * factor).astype(x.dtype), recent

    def _ropes(self) -> tuple[Array, Array]:
        """RoPE's base, and whether it is a layer of the model, each `stages depth`."""
        shape, config = self.architecture.shape, self.architecture.config
        bases = np.full(self.stages * self.depth, config.local_base_frequency, np.float32)
        bases[: shape.layers][~np.array(shape.local)] = config.global_base_frequency
        real, places = np.arange(len(bases)) < shape.layers, (self.stages, self.depth)
        return jnp.asarray(bases.reshape(places)), jnp.asarray(real.reshape(places))

    def _pipeline(
        self, layers: Any, x: Array, rows: tuple[Array, Attend], caches: Any
    ) -> tuple[Array, Any]:
        """On one device: computes its stage of one micro-batch after another."""
        count, stage = self.micro_batches, jax.lax.axis_index(STAGE)
        onward = [(number, number + 1) for number in range(self.stages - 1)]
        # Scalars belong to all rows.
        apart = jax.tree.map(
            lambda a: a.reshape(count, -1, *a.shape[1:]) if a.ndim else a, (x, rows)
        )
        rings, recent = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[2:]), caches)
        base, adapter, ropes = jax.tree.map(lambda a: a[0], layers)

        def slot(carry: Any, time: Array) -> tuple[Any, Array]:
            received, recent = carry
            number = time - stage
            at = jnp.clip(number, 0, count - 1)
            first, own = jax.tree.map(lambda a: a[at] if a.ndim else a, apart)
            old, new = jax.tree.map(lambda a: a[at], (rings, recent)), []
            x = jnp.where(stage == 0, first, received)
            for index in range(self.depth):
                cache = None if recent is None else (old[0][index], old[1][index])
                rope = jax.tree.map(itemgetter(index), ropes)
                x, cache = self._layer(index, (base, adapter, rope), x, *own, cache)
                new.append(cache)
            if recent is not None:
                recent = jax.tree.map(
                    lambda a, old, new: a.at[at].set(jnp.where(number == at, new, old)),
                    recent,
                    old[1],
                    new,
                )
            return (jax.lax.ppermute(x, STAGE, onward), recent), x

        begin = jnp.zeros_like(apart[0][0]), recent
        (_, recent), found = jax.lax.scan(slot, begin, jnp.arange(count + self.stages - 1))
        last = jnp.where(stage == self.stages - 1, found[self.stages - 1 :], 0)
        recent = jax.tree.map(lambda a: a.reshape(1, -1, *a.shape[2:]), recent)
        return jax.lax.psum(last.reshape(x.shape), STAGE), recent

    @partial(jax.checkpoint, static_argnums=(0, 1))
    def _layer(
        self,
        index: int,
        weights: Any,
        x: Array,
        positions: Array,
        attend: Attend,
        cache: LayerCache,
    ) -> tuple[Array, LayerCache]:
        base, adapter, (rope, real) = weights
        graph, state = self._block
        flat = []
        for path, variable in nnx.to_flat_state(state):
            name = f"{_LAYERS}{index}." + ".".join(map(str, path[2:]))
            value = adapter[name] if name in adapter else base[name]
            if name.endswith("norm.scale"):
                value = norm_factor(value, self.architecture.shape)
            else:
                value = value.astype(variable.dtype)
            flat.append((path, variable.replace(value)))
        block = nnx.merge(graph, nnx.from_flat_state(flat))
        vars(block.layers[0].attn).update(rope_base_frequency=rope)
        found, cache = block(x, positions, attend=attend, cache=cache)
        return jnp.where(real, found, x), cache


def _of_layers(params: Mapping[str, Any]) -> Params:
    return {name: x for name, x in params.items() if name.startswith(_LAYERS)}


def _with_sharding(shapes: Mapping[str, Any], place: NamedSharding) -> Params:
    return {name: x.update(sharding=place) for name, x in shapes.items()}
