"""Conversion between our parameters and the tensors of Hugging Face's folders.

One table for both directions: the tensors of each of our parameters, and how to read and write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Entry:
    """Storage of one of our parameters: tensor names and conversions."""

    tensors: tuple[str, ...]
    read: Callable[[Sequence[np.ndarray], tuple[int, ...]], np.ndarray]
    write: Callable[[np.ndarray], list[np.ndarray]]
    stored_shape: Callable[[tuple[int, ...]], tuple[int, ...]]


def _plain(tensor: str) -> Entry:
    return Entry((tensor,), lambda t, _: t[0], lambda w: [w], lambda shape: shape)


def _transposed(tensor: str) -> Entry:
    return Entry((tensor,), lambda t, _: t[0].T, lambda w: [w.T], lambda shape: shape[::-1])


def _heads_in(tensor: str) -> Entry:
    """Our shape is `heads embed head_dim`, the stored one `(heads head_dim) embed`."""
    return Entry(
        (tensor,),
        lambda t, shape: _split_heads(t[0], shape),
        lambda w: [_join_heads(w)],
        lambda shape: (shape[0] * shape[2], shape[1]),
    )


def _stacked_heads_in(*tensors: str) -> Entry:
    """Our shape is `len(tensors) heads embed head_dim`; stored one by one as in `_heads_in`."""
    return Entry(
        tensors,
        lambda t, shape: np.stack([_split_heads(x, shape[1:]) for x in t]),
        lambda w: [_join_heads(x) for x in w],
        lambda shape: (shape[1] * shape[3], shape[2]),
    )


def _heads_out(tensor: str) -> Entry:
    """Our shape is `heads head_dim embed`, the stored one `embed (heads head_dim)`."""
    return Entry(
        (tensor,),
        lambda t, shape: t[0].T.reshape(shape),
        lambda w: [w.reshape(-1, w.shape[2]).T],
        lambda shape: (shape[2], shape[0] * shape[1]),
    )


def _split_heads(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    heads, embed, head_dim = shape
    return stored.reshape(heads, head_dim, embed).transpose(0, 2, 1)


def _join_heads(ours: np.ndarray) -> np.ndarray:
    return ours.transpose(0, 2, 1).reshape(-1, ours.shape[1])


PROJECTIONS = {
    "attn.q_einsum": ("self_attn.q_proj",),
    "attn.kv_einsum": ("self_attn.k_proj", "self_attn.v_proj"),
    "attn.qkv_einsum": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.attn_vec_einsum": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj",),
    "mlp.up_proj": ("mlp.up_proj",),
    "mlp.down_proj": ("mlp.down_proj",),
    "per_layer.input_gate": ("per_layer_input_gate",),
    "per_layer.projection": ("per_layer_projection",),
}
"""Hugging Face's projections in each of our matrices, in the order of its first axis, by module."""
_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn._query_norm": "self_attn.q_norm",
    "attn._key_norm": "self_attn.k_norm",
    "per_layer.norm": "post_per_layer_input_norm",
}
_OUTSIDE = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "per_layer_embedder.embedding": "model.embed_tokens_per_layer.weight",
    "per_layer_embedder.norm.scale": "model.per_layer_projection_norm.weight",
}
"""Tensors outside of layers that are stored as they are."""


def entry(name: str) -> Entry:
    """The table's entry for one of our parameters."""
    if name in _OUTSIDE:
        return _plain(_OUTSIDE[name])
    if name == "per_layer_embedder.projection.kernel":
        return _transposed("model.per_layer_model_projection.weight")
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(w|kernel|scale)", name)
    assert match, name
    layer, module = f"model.layers.{match[1]}", match[2]
    if module == "output":
        return _plain(f"{layer}.layer_scalar")
    if module in _NORMS:
        return _plain(f"{layer}.{_NORMS[module]}.weight")
    stored = [f"{layer}.{projection}.weight" for projection in PROJECTIONS[module]]
    if module.startswith(("mlp.", "per_layer.")):
        return _transposed(*stored)
    layouts = {"attn.q_einsum": _heads_in, "attn.attn_vec_einsum": _heads_out}
    return layouts.get(module, _stacked_heads_in)(*stored)
