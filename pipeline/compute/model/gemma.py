"""Gemma 2, 3 and 4 from tokens to hidden states: one class with one set of parameter names.

The forward pass is implemented here for three reasons: qwix attaches LoRA to the outermost
`__call__` only, so every use of the model has to go through that one method; it must return hidden
states, because the logits of a 262,144-entry vocabulary must never exist whole; and attention must
be replaceable, because training, prefill and decoding use different caches and masks (`Attend`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from tunix.models.gemma3 import model as gemma3

from pipeline.compute.model.architecture import Architecture
from pipeline.compute.model.attention import Attend, LayerCache, attend_causally
from pipeline.compute.model.layer import (
    Group,
    KeyValue,
    LayerInputs,
    make_layer,
    normalize,
    run_layer,
)
from pipeline.compute.model.lookup import look_up, look_up_in_host
from pipeline.compute.model.remat import Parts, Remat
from pipeline.compute.model.sharding import ALL_AXES, by_row, gathered_sharding
from pipeline.data.models.model_shape import ModelShape


class Gemma(nnx.Module):
    """The model; its `__call__` returns hidden states.

    Args:
        architecture: its architecture.
        mesh: devices; hidden states are sharded by row.
        rngs: initialises parameters.

    Attributes:
        attaching: qwix is adding an adapter to the modules that it sees; see `lora.attach`.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        mesh: Mesh,
        rngs: nnx.Rngs,
    ) -> None:
        config = architecture.config
        dtype = config.param_dtype
        self.architecture = architecture
        self.mesh = mesh
        self.attaching = False
        self.embedder = gemma3.Embedder(
            config.num_embed, config.embed_dim, rngs=rngs, param_dtype=dtype
        )
        layers = range(architecture.shape.layers)
        self.layers = nnx.List([make_layer(architecture, number, rngs=rngs) for number in layers])
        if architecture.shape.per_layer_input:
            self.per_layer_embedder = _per_layer_embedder(architecture, rngs)
        self.final_norm = gemma3.RMSNorm(config.embed_dim, rngs=rngs, param_dtype=dtype)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        *,
        attend: Attend = jax.tree_util.Partial(attend_causally),  # noqa: B008  # a constant
        caches: Sequence[LayerCache] | None = None,
        remat: Remat | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], tuple[LayerCache, ...]]:
        """Hidden states after the final norm, and the new cache of each layer.

        Args:
            tokens: token ids.
            positions: position of each token in its sequence, for RoPE.
            attend: attention over the caches; a pytree.
            caches: cache of each layer that has keys and values, for `attend`; None: no caches.
            remat: rematerialization for a backward pass; None: no backward pass. With it `attend`
                must be a pytree of arrays with a leading axis of rows, and there are no caches.
        """
        if remat is not None:
            return self._for_gradient(tokens, positions, attend, remat), ()
        x, per_layer = self._embed(tokens)
        new_caches: list[LayerCache] = []
        held: list[KeyValue] = []
        shape, kinds = self.architecture.shape, _LayerKinds(self.architecture.shape)
        for number, layer in enumerate(self.layers):
            inputs = LayerInputs(positions, _of_layer(per_layer, number), attend)
            source = shape.kv_source(number)
            cache = None if caches is None else caches[source]
            shared = None
            if source != number:
                shared, cache = held[source], (cache, new_caches[source])
            run = partial(run_layer, architecture=self.architecture)
            if self.attaching:
                x, key_value, cache = run(layer, x, shared, inputs, cache=cache)
            else:
                graphdef, state = nnx.split(layer)
                pure = kinds.function(number, partial(_merged, graphdef, run), state)
                x, key_value, cache = pure(state, x, shared, inputs, cache=cache)
            x = self._constrain(x)
            if shared is None:
                held.append(key_value)
                new_caches.append(cache)
        return normalize(self.final_norm, x), tuple(new_caches)

    def _for_gradient(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        attend: Attend,
        remat: Remat,
    ) -> Float[Array, "batch seq embed"]:
        shape = self.architecture.shape
        parts = Parts.of(*tokens.shape, tokens=remat.layer_tokens, mesh=self.mesh)
        gather = partial(nnx.map_state, partial(_gathered, parts.mesh))
        positions, attend = jax.tree.map(parts.split, (positions, attend))
        x, per_layer = jax.tree.map(parts.split, self._embed(tokens))
        held: dict[int, KeyValue] = {}
        kinds = _LayerKinds(shape)
        for number, layer in enumerate(self.layers):
            source = shape.kv_source(number)
            keeps = source == number and number in shape.shared_sources
            adapter, base, run = _pure(layer, self.architecture, keeps=keeps)
            inputs = LayerInputs(positions, _of_layer(per_layer, number), attend)
            on_parts = remat.layer_on_parts(parts, run, gather=gather)
            pure = kinds.function(number, on_parts, (adapter, base), keeps=keeps)
            x, key_value = pure(adapter, base, x, held.get(source), inputs)
            if keeps:
                held[number] = key_value
        whole = remat.wrap(partial(normalize, self.final_norm))
        x = remat.wrap_parts(partial(parts.map, whole))(x)
        return self._constrain(parts.join(x))

    def _embed(
        self, tokens: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq embed"], Float[Array, "batch seq layers per_layer"] | None]:
        """The tokens' scaled embeddings and the inputs of all layers; None: layers have none."""
        x = look_up(tokens, self.embedder.input_embedding[...], mesh=self.mesh)
        x = self._constrain(x * jnp.sqrt(x.shape[-1]).astype(x.dtype))
        shape = self.architecture.shape
        if not shape.per_layer_input:
            return x, None
        embedder, sizes = self.per_layer_embedder, (shape.layers, shape.per_layer_input)
        projected = embedder.projection(x) * jnp.asarray(shape.embed**-0.5, x.dtype)
        projected = normalize(embedder.norm, projected.reshape(*tokens.shape, *sizes))
        table = embedder.embedding[...]
        if table.ndim == 3:  # in host memory
            found = look_up_in_host(tokens, table, mesh=self.mesh)[..., : math.prod(sizes)]
        else:
            found = look_up(tokens, table, mesh=self.mesh, axes=ALL_AXES)
        found *= jnp.sqrt(shape.per_layer_input).astype(x.dtype)
        total = (projected + found.reshape(projected.shape)) * jnp.asarray(2**-0.5, x.dtype)
        return x, self._constrain(total)

    def _constrain(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, by_row(self.mesh))


def _per_layer_embedder(architecture: Architecture, rngs: nnx.Rngs) -> Group:
    """Inputs of all layers from the tokens, `vocab layers*width`, and from their embeddings."""
    shape, dtype = architecture.shape, architecture.config.param_dtype
    width, embedder = shape.layers * shape.per_layer_input, Group()
    embedder.embedding = nnx.Param(jnp.zeros((shape.vocab, width), dtype))
    embedder.projection = nnx.Linear(
        shape.embed, width, use_bias=False, rngs=rngs, param_dtype=dtype
    )
    embedder.norm = gemma3.RMSNorm(shape.per_layer_input, rngs=rngs, param_dtype=dtype)
    return embedder


def _of_layer(per_layer: jax.Array | None, number: int) -> jax.Array | None:
    """The inputs of a layer from those of all layers."""
    return None if per_layer is None else per_layer[..., number, :]


def _gathered(mesh: Mesh, path: tuple[Any, ...], variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
    """A frozen parameter of a layer, all-gathered along fsdp."""
    place = gathered_sharding(".".join(map(str, path)), variable.shape, mesh)
    return variable.replace(jax.lax.with_sharding_constraint(variable[...], place))


def _merged(
    graphdef: nnx.GraphDef[gemma3.DecoderLayer],
    run: Callable[..., Any],
    state: nnx.State,
    *arrays: Any,
    cache: LayerCache,
) -> Any:
    """`run` of the layer with a state."""
    return run(nnx.merge(graphdef, state), *arrays, cache=cache)


class _LayerKinds:
    """Functions of layers as compiled functions inside a program, one for all layers of a kind.

    JAX then traces, differentiates and lowers each kind once and not each layer, and XLA inlines
    the functions. Layers are of a kind if they have the same modules, attention and shapes, and
    return the same.

    Args:
        shape: of the model.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._functions: dict[object, Callable[..., Any]] = {}

    def function(
        self, number: int, of_layer: Callable[..., Any], state: Any, *, keeps: bool = False
    ) -> Callable[..., Any]:
        """The function of the kind of layer `number`: the first one that was given for it.

        Args:
            number: of the layer.
            of_layer: a pure function of the layer's state and of arrays.
            state: the layer's state.
            keeps: whether the function also returns the keys and values.
        """
        leaves, structure = jax.tree.flatten(state)
        avals = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        kind = self._shape.local[number], self._shape.has_kv(number), keeps, structure, avals
        return self._functions.setdefault(kind, jax.jit(of_layer))


def _pure(
    layer: gemma3.DecoderLayer, architecture: Architecture, *, keeps: bool
) -> tuple[nnx.State, nnx.State, Callable[..., tuple[jax.Array, KeyValue | None]]]:
    """The layer's adapter, its other state, and the layer as a pure function of both.

    `jax.checkpoint` and `jax.lax.map` need a pure function, and `nnx.remat` fails inside Tunix's
    Gemma 3 (TraceContextError). The function casts the adapter, so that the gradient of the float32
    adapter is summed in float32 over the parts of the batch. It returns the keys and values if
    `keeps`.
    """
    graphdef, adapter, base = nnx.split(layer, nnx.LoRAParam, ...)
    dtype = architecture.config.param_dtype

    def cast(_: Any, variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        return variable.replace(variable[...].astype(dtype))

    def run(
        adapter: nnx.State,
        base: nnx.State,
        x: jax.Array,
        shared: KeyValue | None,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, KeyValue | None]:
        merged = nnx.merge(graphdef, nnx.map_state(cast, adapter), base)
        x, key_value, _ = run_layer(merged, x, shared, inputs, architecture=architecture)
        return x, key_value if keeps else None

    return adapter, base, run
