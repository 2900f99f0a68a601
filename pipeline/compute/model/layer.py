"""One layer of Gemma 2, 3 or 4: its modules, with those of Tunix's Gemma 3, and its computation.

Gemma 2 (arXiv:2408.00118) is Gemma 3 (arXiv:2503.19786) with soft-capped scores instead of norms of
queries and keys. Gemma 4 is Gemma 3 with norms of values; with RoPE on a part of a head and another
width of heads in global layers; with last layers that attend to the keys and values of earlier
ones; and with an input of each layer that depends on the token (transformers 5.12.1,
`modeling_gemma4.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4

from pipeline.compute.model.architecture import Architecture
from pipeline.compute.model.attention import Attend, Bounds, Keys, LayerCache
from pipeline.data.models.model_shape import ModelShape

KeyValue = tuple[Keys, Keys]
"""Keys and values of all positions of a layer."""


class Group(nnx.Module):
    """Modules and parameters under a common path."""


class LayerInputs(NamedTuple):
    """Inputs of a layer besides the hidden states.

    Attributes:
        positions: position of each token in its sequence, for RoPE.
        per_layer: the tokens' inputs of this layer; None: none.
        attend: attention over the caches.
    """

    positions: Int[Array, "batch seq"]
    per_layer: Float[Array, "batch seq per_layer"] | None
    attend: Attend


def make_layer(architecture: Architecture, number: int, *, rngs: nnx.Rngs) -> gemma3.DecoderLayer:
    """The modules of layer `number`; attributes that it does not need are removed."""
    shape, config = architecture.shape, architecture.layer_config(number)
    kind = (
        gemma3.AttentionType.LOCAL_SLIDING if shape.local[number] else gemma3.AttentionType.GLOBAL
    )
    layer = gemma3.DecoderLayer(config, attn_type=kind, rngs=rngs)
    attn, dtype = layer.attn, config.param_dtype
    if not shape.has_kv(number):
        if attn.use_qkv_einsum:
            size = (shape.heads, shape.embed, config.head_dim)
            attn.q_einsum = gemma3.Einsum(
                "BTD,NDH->BTNH", size, rngs=rngs, sharding=(), param_dtype=dtype
            )
            del attn.qkv_einsum
        else:
            del attn.kv_einsum
        del attn._key_norm  # noqa: SLF001  # Tunix's names
    if not shape.query_key_norm:
        del attn._query_norm, attn._key_norm  # noqa: SLF001
    if shape.value_norm:
        layer.output = Group()
        layer.output.scale = nnx.Param(jnp.ones(1, dtype))
    if shape.per_layer_input:
        width, settings = shape.per_layer_input, {"use_bias": False, "param_dtype": dtype}
        layer.per_layer = Group()
        layer.per_layer.input_gate = nnx.Linear(shape.embed, width, rngs=rngs, **settings)
        layer.per_layer.projection = nnx.Linear(width, shape.embed, rngs=rngs, **settings)
        layer.per_layer.norm = gemma3.RMSNorm(shape.embed, rngs=rngs, param_dtype=dtype)
    return layer


def run_layer(
    layer: gemma3.DecoderLayer,
    x: Float[Array, "batch seq embed"],
    shared: KeyValue | None,
    inputs: LayerInputs,
    *,
    architecture: Architecture,
    cache: LayerCache = None,
) -> tuple[Float[Array, "batch seq embed"], KeyValue, LayerCache]:
    """Computes a layer.

    Args:
        layer: of `make_layer`.
        x: hidden states.
        shared: keys and values of the layer that it attends to; None: it has its own.
        inputs: its other inputs.
        architecture: of the model.
        cache: for `inputs.attend`.

    Returns:
        New hidden states, keys and values, and the new cache.
    """
    attn, shape = layer.attn, architecture.shape
    h = normalize(layer.pre_attention_norm, x)
    query, key, value = _project(layer, h, shared)
    if shape.query_key_norm:
        query = normalize(attn._query_norm, query)  # noqa: SLF001  # Tunix's names
        if shared is None:
            key = normalize(attn._key_norm, key)  # noqa: SLF001
    query = _rotate(attn, query, inputs.positions, architecture)
    if shared is None:
        key = _rotate(attn, key, inputs.positions, architecture)
        value = _unit(value).astype(value.dtype) if shape.value_norm else value
    window = attn.sliding_window_size if _is_local(attn) else None
    encoded, cache = inputs.attend(
        query * architecture.query_scale,
        key,
        value,
        bounds=Bounds(window, shape.attention_softcap, shared is not None),
        cache=cache,
    )
    x += normalize(layer.post_attention_norm, attn.attn_vec_einsum(encoded))
    h = layer.mlp(normalize(layer.pre_ffw_norm, x))
    x = x + normalize(layer.post_ffw_norm, h)
    if inputs.per_layer is not None:
        h = nnx.gelu(layer.per_layer.input_gate(x)) * inputs.per_layer
        x += normalize(layer.per_layer.norm, layer.per_layer.projection(h))
    if shape.value_norm:
        x *= layer.output.scale[...]
    return x, (key, value), cache


def normalize(norm: gemma3.RMSNorm, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """RMSNorm, in float32 for any dtype of x, as in the reference implementations.

    Args:
        norm: with the factor of `norm_factor` as its scale.
        x: normalized along its last axis.
    """
    return (_unit(x) * norm.scale[...]).astype(x.dtype)


def norm_factor(weight: Float[Array, " width"], shape: ModelShape) -> Float[Array, " width"]:
    """What `normalize` multiplies by, float32: Gemma 2 and 3 store its difference from 1."""
    exact = weight.astype(jnp.float32)
    return exact if shape.value_norm else 1 + exact


def _unit(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Divided by the root mean square along the last axis; float32."""
    exact = x.astype(jnp.float32)
    return exact * jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + 1e-6)


def _project(
    layer: gemma3.DecoderLayer, h: jax.Array, shared: KeyValue | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    attn: Any = layer.attn
    if shared is not None:
        return attn.q_einsum(h), *shared
    if attn.use_qkv_einsum:
        query, key, value = attn.qkv_einsum(h)
        return query, key, value
    query = attn.q_einsum(h)
    key, value = attn.kv_einsum(h)
    return query, key, value


def _rotate(
    attn: gemma3.Attention, x: jax.Array, positions: jax.Array, architecture: Architecture
) -> jax.Array:
    """RoPE."""
    rope = {
        "base_frequency": attn.rope_base_frequency,
        "scale_factor": attn.rope_scale_factor,
    }
    share = architecture.global_rotary
    if share < 1.0 and not _is_local(attn):
        return gemma4.apply_rope(x, positions, rope_proportion=share, **rope)
    return gemma3.apply_rope(x, positions, head_dim=attn.head_dim, **rope)


def _is_local(attn: gemma3.Attention) -> bool:
    return attn.attn_type == gemma3.AttentionType.LOCAL_SLIDING
