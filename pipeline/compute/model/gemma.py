"""Gemma 2 and 3 from tokens to hidden states, with the modules of Tunix's Gemma 3.

Gemma 2 (arXiv:2408.00118) is Gemma 3 (arXiv:2503.19786) with soft-capped scores instead of norms of
queries and keys, and other sizes; so both are one class with one set of parameter names.

The forward pass is implemented here for three reasons: qwix attaches LoRA to the outermost
`__call__` only, so every use of the model has to go through that one method; it must return hidden
states, because the logits of a 262,144-entry vocabulary must never exist whole; and attention must
be replaceable, because training, prefill and decoding use different caches and masks (`Attend`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int
from tunix.models.gemma3 import model as gemma3

from pipeline.compute.model.architecture import Architecture
from pipeline.compute.model.attention import Attend, Bounds, LayerCache, attend_causally
from pipeline.compute.model.lookup import look_up
from pipeline.compute.model.remat import Parts, Remat
from pipeline.compute.model.sharding import gathered_sharding, mesh_of


class Gemma(nnx.Module):
    """The model; its `__call__` returns hidden states.

    Args:
        architecture: its architecture.
        activations: sharding of hidden states; None leaves it to the compiler.
        rngs: initialises parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        activations: NamedSharding | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        config = architecture.config
        dtype = config.param_dtype
        self.architecture = architecture
        self.activations = activations
        self.embedder = gemma3.Embedder(
            config.num_embed, config.embed_dim, rngs=rngs, param_dtype=dtype
        )
        self.layers = nnx.List(
            [
                _make_layer(architecture, local=local, rngs=rngs)
                for local in architecture.shape.local
            ]
        )
        self.final_norm = gemma3.RMSNorm(config.embed_dim, rngs=rngs, param_dtype=dtype)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        *,
        attend: Attend = attend_causally,
        caches: Sequence[LayerCache] | None = None,
        remat: Remat | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], tuple[LayerCache, ...]]:
        """Hidden states after the final norm, and the new cache of each layer.

        Args:
            tokens: token ids.
            positions: position of each token in its sequence, for RoPE.
            attend: attention over the caches.
            caches: cache of each layer for `attend`; None: no caches.
            remat: rematerialization for a backward pass; None: no backward pass. With it `attend`
                must be a pytree of arrays with a leading axis of rows, and there are no caches.
        """
        if remat is not None:
            return self._for_gradient(tokens, positions, attend, remat), ()
        x = self._constrain(self._embed(tokens))
        new_caches = []
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, cache = _layer(layer, x, positions, self.architecture, attend, cache)  # noqa: PLW2901
            x = self._constrain(x)
            new_caches.append(cache)
        return _normalize(self.final_norm, x), tuple(new_caches)

    def _for_gradient(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        attend: Attend,
        remat: Remat,
    ) -> Float[Array, "batch seq embed"]:
        assert self.activations is not None
        parts = Parts.of(*tokens.shape, tokens=remat.layer_tokens, mesh=mesh_of(self.activations))
        others = jax.tree.map(parts.split, (positions, attend))
        gather = partial(nnx.map_state, partial(_gathered, parts.mesh))
        x = parts.split(self._constrain(self._embed(tokens)))
        for layer in self.layers:
            adapter, base, run = _pure(layer, self.architecture)
            x = remat.layer_on_parts(parts, run, gather=gather)(adapter, base, x, *others)
        normalize = remat.wrap(partial(_normalize, self.final_norm))
        x = remat.wrap_parts(partial(parts.map, normalize))(x)
        return self._constrain(parts.join(x))

    def _embed(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        mesh = None if self.activations is None else mesh_of(self.activations)
        x = look_up(tokens, self.embedder.input_embedding[...], mesh=mesh)
        return x * jnp.sqrt(x.shape[-1]).astype(x.dtype)

    def _constrain(self, x: jax.Array) -> jax.Array:
        if self.activations is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.activations)


def _make_layer(architecture: Architecture, *, local: bool, rngs: nnx.Rngs) -> gemma3.DecoderLayer:
    kind = gemma3.AttentionType.LOCAL_SLIDING if local else gemma3.AttentionType.GLOBAL
    layer = gemma3.DecoderLayer(architecture.config, attn_type=kind, rngs=rngs)
    if not architecture.shape.query_key_norm:
        del layer.attn._query_norm, layer.attn._key_norm  # noqa: SLF001  # Tunix's names
    return layer


def _gathered(mesh: Mesh, path: tuple[Any, ...], variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
    """A frozen parameter of a layer, all-gathered along fsdp."""
    place = gathered_sharding(".".join(map(str, path)), variable.shape, mesh)
    return variable.replace(jax.lax.with_sharding_constraint(variable[...], place))


def _pure(
    layer: gemma3.DecoderLayer, architecture: Architecture
) -> tuple[nnx.State, nnx.State, Callable[..., jax.Array]]:
    """The layer's adapter, its other state, and the layer as a pure function of both.

    `jax.checkpoint` and `jax.lax.map` need a pure function, and `nnx.remat` fails inside Tunix's
    Gemma 3 (TraceContextError). The function casts the adapter, so that the gradient of the float32
    adapter is summed in float32 over the parts of the batch.
    """
    graphdef, adapter, base = nnx.split(layer, nnx.LoRAParam, ...)
    dtype = architecture.config.param_dtype

    def cast(_: Any, variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        return variable.replace(variable[...].astype(dtype))

    def run(
        adapter: nnx.State, base: nnx.State, x: jax.Array, positions: jax.Array, attend: Attend
    ) -> jax.Array:
        merged = nnx.merge(graphdef, nnx.map_state(cast, adapter), base)
        return _layer(merged, x, positions, architecture, attend, None)[0]

    return adapter, base, run


def _layer(
    layer: gemma3.DecoderLayer,
    x: jax.Array,
    positions: jax.Array,
    architecture: Architecture,
    attend: Attend,
    cache: LayerCache,
) -> tuple[jax.Array, LayerCache]:
    attn, shape = layer.attn, architecture.shape
    h = _normalize(layer.pre_attention_norm, x)
    if attn.use_qkv_einsum:
        query, key, value = attn.qkv_einsum(h)
    else:
        query = attn.q_einsum(h)
        key, value = attn.kv_einsum(h)
    if shape.query_key_norm:
        query = _normalize(attn._query_norm, query)  # noqa: SLF001  # Tunix's names
        key = _normalize(attn._key_norm, key)  # noqa: SLF001
    rope = {
        "head_dim": attn.head_dim,
        "base_frequency": attn.rope_base_frequency,
        "scale_factor": attn.rope_scale_factor,
    }
    query, key = (gemma3.apply_rope(x, positions, **rope) for x in (query, key))
    local = attn.attn_type == gemma3.AttentionType.LOCAL_SLIDING
    encoded, cache = attend(
        query * architecture.query_scale,
        key,
        value,
        bounds=Bounds(
            attn.sliding_window_size if local else None, architecture.shape.attention_softcap
        ),
        cache=cache,
    )
    x += _normalize(layer.post_attention_norm, attn.attn_vec_einsum(encoded))
    h = layer.mlp(_normalize(layer.pre_ffw_norm, x))
    return x + _normalize(layer.post_ffw_norm, h), cache


def _normalize(norm: gemma3.RMSNorm, x: jax.Array) -> jax.Array:
    # In float32 for any dtype of x, as in the reference implementation.
    return norm(x.astype(jnp.float32)).astype(x.dtype)
