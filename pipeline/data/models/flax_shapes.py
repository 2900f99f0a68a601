"""Shapes of the tensors of Google's orbax checkpoints, as stored and as a configuration requires.

Reads metadata only, and needs no JAX: each tensor is a zarr array, whose `.zarray` is a file, or a
key of an OCDBT store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.data.models.model_shape import ModelShape

Shape = tuple[int, ...]

OCDBT = "manifest.ocdbt"
"""File of a checkpoint whose tensors are in an OCDBT store."""
_ARRAY = "/.zarray"
_TOP = re.compile(r"^(params/)?(transformer/)?")
_NEWER = {
    "/attn/query_norm/": "/attn/_query_norm/",
    "/attn/key_norm/": "/attn/_key_norm/",
    "/per_layer_embeddings": "/per_layer_input_embedding",
}
"""Names in checkpoints of Gemma 4, and those of Tunix's modules."""


def flax_name(path: str) -> str:
    """The name of a tensor in a flat or nested tree, such as `layer_0/attn/q_einsum/w`.

    Args:
        path: of the tensor in the tree, joined by slashes.
    """
    name = _TOP.sub("", path)
    for newer, ours in _NEWER.items():
        name = name.replace(newer, ours)
    return name


def stored_shapes(place: Path) -> dict[str, Shape]:
    """The shapes of a checkpoint's tensors by name.

    Raises:
        ValueError: if the metadata is damaged.
    """
    import tensorstore  # late: only checkpoints of this format need it

    files = {"driver": "file", "path": f"{place}/"}
    store = {"driver": "ocdbt", "base": files} if (place / OCDBT).is_file() else files
    found = {}
    try:
        values = tensorstore.KvStore.open(store).result()
        for key in map(bytes.decode, values.list().result()):
            if key.endswith(_ARRAY):
                # Orbax joins the keys of a path by dots.
                name = flax_name(key.removesuffix(_ARRAY).replace(".", "/"))
                found[name] = tuple(json.loads(values.read(key).result().value)["shape"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"model.path: {place} is damaged: {why}") from None
    return found


def required_shapes(shape: ModelShape, stored: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the text model's tensors.

    Args:
        shape: the model.
        stored: the tensors that there are. Gemma 2 2B stores the gate and up projections
            untransposed, all later models transposed.
    """
    layers, d, p = shape.layers, shape.embed, shape.per_layer_input
    yield "embedder/input_embedding", (shape.vocab, d)
    if p:
        yield "embedder/per_layer_input_embedding", (shape.vocab, layers, p)
        yield "embedder/per_layer_model_projection/w", (d, layers, p)
        yield "embedder/per_layer_projection_norm/scale", (p,)
    for layer in range(layers):
        for name, size in _layer_shapes(shape, layer, stored):
            yield f"layer_{layer}/{name}", size
    yield "final_norm/scale", (d,)


def _layer_shapes(
    shape: ModelShape, layer: int, stored: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape]]:
    d, p, heads, kv_heads = shape.embed, shape.per_layer_input, shape.heads, shape.kv_heads
    h, f, has_kv = shape.head_dim_of(layer), shape.hidden_of(layer), shape.has_kv(layer)
    for norm in ("pre_attention", "post_attention", "pre_ffw", "post_ffw"):
        yield f"{norm}_norm/scale", (d,)
    if heads == kv_heads and has_kv:
        yield "attn/qkv_einsum/w", (3, heads, d, h)
    else:
        yield "attn/q_einsum/w", (heads, d, h)
        if has_kv:
            yield "attn/kv_einsum/w", (2, kv_heads, d, h)
    yield "attn/attn_vec_einsum/w", (heads, h, d)
    if shape.query_key_norm:
        yield "attn/_query_norm/scale", (h,)
        if has_kv:
            yield "attn/_key_norm/scale", (h,)
    gates, straight = "mlp/gating_einsum/w", (2, d, f)
    yield gates, straight if stored.get(f"layer_{layer}/{gates}") == straight else (2, f, d)
    yield "mlp/linear/w", (f, d)
    if p:
        yield "per_layer_input_gate/w", (d, p)
        yield "per_layer_projection/w", (p, d)
        yield "post_per_layer_input_norm/scale", (d,)
    if shape.value_norm:
        yield "skip_scale", (1,)
