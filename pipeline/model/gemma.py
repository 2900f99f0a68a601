"""Gemma 3 from tokens to hidden states, on Tunix's modules and parameters.

The forward pass is ours for three reasons: qwix attaches LoRA to the outermost `__call__` only, so
every use of the model has to go through that one method; it must return hidden states, because the
logits of a 262,144-entry vocabulary must never exist whole; and attention must be exchangeable,
because training, prefill and decoding attend to different things (`Attend`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int
from tunix.models.gemma3 import model as gemma3

LayerCache = Any
"""What an `Attend` keeps for one layer; the model passes it through without looking inside."""


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer over whatever the caller keeps.

    Queries are scaled already. `window` is the number of positions a query sees, itself included
    (None: all of them). Returns the encoded values and what to keep for this layer.
    """

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        *,
        window: int | None,
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], LayerCache]:
        """Attends and keeps; see the class."""


def attend_causally(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    *,
    window: int | None,
    cache: LayerCache,
) -> tuple[Float[Array, "batch seq heads head_dim"], LayerCache]:
    """Every position sees itself and the ones before it; the cache is passed through untouched.

    Rows are left-aligned, so the padding behind a row's end is invisible to its real positions.
    """
    reach = None if window is None or window >= query.shape[1] else (window - 1, 0)
    encoded = jax.nn.dot_product_attention(
        query, key, value, scale=1.0, is_causal=True, local_window_size=reach
    )
    return encoded, cache


class Gemma(gemma3.Gemma3):
    """Gemma 3 whose `__call__` returns hidden states.

    Args:
        config: Tunix's architecture.
        query_scale: queries are multiplied by this before attention.
        activations: how hidden states are sharded; None leaves it to the compiler.
        rngs: initialises parameters.
    """

    def __init__(
        self,
        config: gemma3.ModelConfig,
        *,
        query_scale: float,
        activations: NamedSharding | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(config, rngs=rngs)
        self.query_scale = query_scale
        self.activations = activations

    def __call__(  # hidden states instead of logits, on purpose
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        *,
        attend: Attend = attend_causally,
        caches: Sequence[LayerCache] | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "batch seq embed"], tuple[LayerCache, ...]]:
        """Hidden states after the final norm, and what `attend` kept for each layer.

        Args:
            tokens: token ids.
            positions: position of each token in its row, for RoPE.
            attend: attention over the caches.
            caches: one entry a layer for `attend`; None: an empty one for each.
            remat: recompute each layer in the backward pass instead of keeping its activations.
        """
        x = self._constrain(self.embedder.encode(tokens))
        kept = []
        for layer, cache in zip(self.layers, caches or [None] * self.num_layers, strict=True):
            run = _recomputed(layer) if remat else _plain(layer)
            x, cache = run(x, positions, self.query_scale, attend, cache)  # noqa: PLW2901
            x = self._constrain(x)
            kept.append(cache)
        return _normalize(self.final_norm, x), tuple(kept)

    def _constrain(self, x: jax.Array) -> jax.Array:
        if self.activations is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.activations)


_RunLayer = Callable[..., tuple[jax.Array, LayerCache]]


def _plain(layer: gemma3.DecoderLayer) -> _RunLayer:
    def run(*args: Any) -> tuple[jax.Array, LayerCache]:
        return _layer(layer, *args)

    return run


def _recomputed(layer: gemma3.DecoderLayer) -> _RunLayer:
    # `nnx.remat` fails inside Tunix's Gemma 3 (TraceContextError), so the layer is taken apart and
    # put together again inside a pure function.
    graphdef, state = nnx.split(layer)

    def run(x: jax.Array, positions: jax.Array, *static: Any) -> tuple[jax.Array, LayerCache]:
        def pure(state: nnx.State, x: jax.Array) -> tuple[jax.Array, LayerCache]:
            return _layer(nnx.merge(graphdef, state), x, positions, *static)

        return jax.checkpoint(pure)(state, x)

    return run


def _layer(
    layer: gemma3.DecoderLayer,
    x: jax.Array,
    positions: jax.Array,
    query_scale: float,
    attend: Attend,
    cache: LayerCache,
) -> tuple[jax.Array, LayerCache]:
    attn = layer.attn
    h = _normalize(layer.pre_attention_norm, x)
    if attn.use_qkv_einsum:
        query, key, value = attn.qkv_einsum(h)
    else:
        query = attn.q_einsum(h)
        key, value = attn.kv_einsum(h)
    rope = {
        "head_dim": attn.head_dim,
        "base_frequency": attn.rope_base_frequency,
        "scale_factor": attn.rope_scale_factor,
    }
    query = gemma3.apply_rope(_normalize(attn._query_norm, query), positions, **rope)  # noqa: SLF001
    key = gemma3.apply_rope(_normalize(attn._key_norm, key), positions, **rope)  # noqa: SLF001
    local = attn.attn_type == gemma3.AttentionType.LOCAL_SLIDING
    encoded, cache = attend(
        query * query_scale,
        key,
        value,
        window=attn.sliding_window_size if local else None,
        cache=cache,
    )
    x += _normalize(layer.post_attention_norm, attn.attn_vec_einsum(encoded))
    h = layer.mlp(_normalize(layer.pre_ffw_norm, x))
    return x + _normalize(layer.post_ffw_norm, h), cache


def _normalize(norm: gemma3.RMSNorm, x: jax.Array) -> jax.Array:
    # In float32 whatever the type of x, as the reference implementation does.
    return norm(x.astype(jnp.float32)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a checkpoint's `config.json` says about the model's shape."""

    config: gemma3.ModelConfig
    query_scale: float

    def build(self, rngs: nnx.Rngs, activations: NamedSharding | None = None) -> Gemma:
        """The model with fresh parameters; call it under `nnx.eval_shape` to allocate nothing."""
        return Gemma(self.config, query_scale=self.query_scale, activations=activations, rngs=rngs)

    def window(self, layer: int) -> int | None:
        """Positions that a query of `layer` sees; None: all."""
        pattern = gemma3.GEMMA3_ATTENTION_PATTERN
        if pattern[layer % len(pattern)] == gemma3.AttentionType.LOCAL_SLIDING:
            return self.config.sliding_window_size
        return None


def architecture(hf: dict[str, Any], *, dtype: jnp.dtype) -> Architecture:
    """Reads a Hugging Face `config.json` of a Gemma 3 text model.

    Raises:
        ValueError: one line with everything in it that this implementation does not compute.
    """
    wrong = _unsupported(hf)
    if wrong:
        raise ValueError("config.json: " + "; ".join(wrong))
    rope_global, rope_local = _rope(hf)
    config = gemma3.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        num_embed=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        sliding_window_size=hf["sliding_window"],
        local_base_frequency=rope_local["rope_theta"],
        global_base_frequency=rope_global["rope_theta"],
        local_scale_factor=_rope_factor(rope_local),
        global_scale_factor=_rope_factor(rope_global),
        param_dtype=dtype,
    )
    return Architecture(config=config, query_scale=hf["query_pre_attn_scalar"] ** -0.5)


_REQUIRED = (
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "query_pre_attn_scalar",
)


def _rope(hf: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE settings of global and of local layers; transformers 5 and 4 write them differently."""
    given = hf.get("rope_parameters") or {}
    whole = {"rope_theta": hf.get("rope_theta", 1_000_000.0)}
    local = {"rope_theta": hf.get("rope_local_base_freq", 10_000.0)}
    return (
        whole | (hf.get("rope_scaling") or {}) | (given.get("full_attention") or {}),
        local | (given.get("sliding_attention") or {}),
    )


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_factor(rope: dict[str, Any]) -> float:
    return rope["factor"] if _rope_type(rope) == "linear" else 1.0


def _rope_problems(rope: dict[str, Any]) -> list[str]:
    kind = _rope_type(rope)
    if kind not in {"default", "linear"}:
        return [f"rope_type is {kind!r}, only 'default' and 'linear' are computed"]
    if kind == "linear" and "factor" not in rope:
        return ["rope_type 'linear' without a factor"]
    return [
        f"rope setting {key} is not computed"
        for key in sorted(rope.keys() - {"rope_theta", "rope_type", "type", "factor"})
    ]


def _unsupported(hf: dict[str, Any]) -> list[str]:
    if hf.get("model_type") != "gemma3_text":
        return [f"model_type is {hf.get('model_type')!r}; this version reads 'gemma3_text'"]
    wrong = [f"{key} is missing" for key in _REQUIRED if hf.get(key) is None]
    if wrong:
        return wrong
    if hf["num_attention_heads"] % hf["num_key_value_heads"]:
        wrong.append("num_attention_heads is not a multiple of num_key_value_heads")
    for key, value in (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("rms_norm_eps", 1e-6),
        ("attention_bias", False),
        ("final_logit_softcapping", None),
        ("attn_logit_softcapping", None),
        ("tie_word_embeddings", True),
        ("use_bidirectional_attention", False),
    ):
        if hf.get(key, value) != value:
            wrong.append(f"{key} is {hf[key]!r}, only {value!r} is computed")
    pattern = [
        "sliding_attention" if kind == gemma3.AttentionType.LOCAL_SLIDING else "full_attention"
        for kind in gemma3.GEMMA3_ATTENTION_PATTERN
    ]
    expected = [pattern[i % len(pattern)] for i in range(hf["num_hidden_layers"])]
    if hf.get("layer_types", expected) != expected or hf.get("sliding_window_pattern", 6) != 6:
        wrong.append("layer_types is not Gemma 3's five local layers to one global layer")
    for rope in _rope(hf):
        wrong += _rope_problems(rope)
    return wrong
