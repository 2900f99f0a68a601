"""Shapes of the tensors of Google's orbax checkpoints, as stored and as a configuration requires.

Reads metadata only, and needs no JAX: each tensor is a zarr array, whose `.zarray` is a file, or a
key of an OCDBT store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]

OCDBT = "manifest.ocdbt"
"""File of a checkpoint whose tensors are in an OCDBT store."""
_ARRAY = "/.zarray"
_TOP = re.compile(r"^(params/)?(transformer/)?")


def flax_name(path: str) -> str:
    """The name of a tensor in a flat or nested tree, such as `layer_0/attn/q_einsum/w`.

    Args:
        path: of the tensor in the tree, joined by slashes.
    """
    return _TOP.sub("", path)


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


def required_shapes(
    text: Mapping[str, Any], stored: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the text model's tensors.

    Args:
        text: a complete configuration; see `hf_config.text_config`.
        stored: the tensors that there are. Gemma 2 2B stores the gate and up projections
            untransposed, all later models transposed.
    """
    d, f, h = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    yield "embedder/input_embedding", (text["vocab_size"], d)
    for layer in range(text["num_hidden_layers"]):
        at = f"layer_{layer}"
        for norm in ("pre_attention", "post_attention", "pre_ffw", "post_ffw"):
            yield f"{at}/{norm}_norm/scale", (d,)
        if heads == kv_heads:
            yield f"{at}/attn/qkv_einsum/w", (3, heads, d, h)
        else:
            yield f"{at}/attn/q_einsum/w", (heads, d, h)
            yield f"{at}/attn/kv_einsum/w", (2, kv_heads, d, h)
        yield f"{at}/attn/attn_vec_einsum/w", (heads, h, d)
        if text["model_type"] != "gemma2":
            yield f"{at}/attn/_query_norm/scale", (h,)
            yield f"{at}/attn/_key_norm/scale", (h,)
        gates, straight = f"{at}/mlp/gating_einsum/w", (2, d, f)
        yield gates, straight if stored.get(gates) == straight else (2, f, d)
        yield f"{at}/mlp/linear/w", (f, d)
    yield "final_norm/scale", (d,)
