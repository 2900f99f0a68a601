"""Google's checkpoints from Kaggle: orbax, in the layout of the gemma library.

The name of a tensor is its path in the tree, such as `layer_0/attn/q_einsum/w`, the same for flat
trees (`transformer/layer_0/attn/q_einsum`, then `w`) and nested ones. Orbax is imported in
functions, because samplers of other formats need none of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import GEMMA4
from pipeline.data.models.hf_folder import is_flax_tower

_LINEAR_BY_8 = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
# Settings that the shapes do not determine, by family, layers and width.
_PUBLISHED: dict[tuple[str, int, int], dict[str, Any]] = {
    ("gemma3_text", 18, 640): {"sliding_window": 512},
    ("gemma3_text", 26, 1152): {"sliding_window": 512},
    ("gemma3_text", 34, 2560): {"sliding_window": 1024, **_LINEAR_BY_8},
    ("gemma3_text", 48, 3840): {"sliding_window": 1024, **_LINEAR_BY_8},
    ("gemma3_text", 62, 5376): {
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
        **_LINEAR_BY_8,
    },
    ("gemma2", 26, 2304): {},
    ("gemma2", 42, 3584): {},
    ("gemma2", 46, 4608): {"query_pre_attn_scalar": 144},
    (GEMMA4, 35, 1536): PUBLISHED["gemma-4-e2b"],
    (GEMMA4, 42, 2560): PUBLISHED["gemma-4-e4b"],
}
_GATING = {"gate_proj": 0, "up_proj": 1}
_NAMES = {
    "per_layer_embedder.embedding": "embedder/per_layer_input_embedding",
    "per_layer_embedder.projection.kernel": "embedder/per_layer_model_projection/w",
    "per_layer_embedder.norm.scale": "embedder/per_layer_projection_norm/scale",
    "mlp.down_proj.kernel": "mlp/linear/w",
    "per_layer.input_gate.kernel": "per_layer_input_gate/w",
    "per_layer.projection.kernel": "per_layer_projection/w",
    "per_layer.norm.scale": "post_per_layer_input_norm/scale",
    "output.scale": "skip_scale",
}
"""Names of our parameters that are no paths in the tree, in a layer or outside."""
_TOP = re.compile(r"^(params/)?(transformer/)?")
_NEWER = {
    "/attn/query_norm/": "/attn/_query_norm/",
    "/attn/key_norm/": "/attn/_key_norm/",
    "/per_layer_embeddings": "/per_layer_input_embedding",
}
"""Names in checkpoints of Gemma 4, and those of Tunix's modules."""
_KV = re.compile(r"layer_\d+/attn/(kv_einsum/w|_key_norm/scale)")


class FlaxCheckpoint:
    """The text model's tensors in a checkpoint; ignores those of its other parts.

    Attributes:
        shapes: shapes of the tensors by name.
        dtypes: NumPy names of their dtypes.
        ignored: optional tensors that are not read.
    """

    def __init__(self, place: Path) -> None:
        """Reads the metadata of the tensors.

        Raises:
            ValueError: if orbax cannot read it.
        """
        self._place = place
        self._paths: dict[str, tuple[str, ...]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for path, leaf in _leaves(place).items():
            name = _name("/".join(path))
            if not is_flax_tower(name):
                self._paths[name] = path
                self.shapes[name] = tuple(leaf.shape)
                self.dtypes[name] = str(np.dtype(leaf.dtype))
        # Layers of Gemma 4 that attend to keys and values of other layers have some, too.
        self.ignored = frozenset(name for name in self.shapes if _KV.fullmatch(name))

    def wanted(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The tensor that holds our parameter `name`, and its shape."""
        tensor, half = flax_tensor(name)
        stored = self.shapes.get(tensor, ())
        if half is None:
            # The per-layer embeddings have an axis of layers.
            joined = (*stored[:1], math.prod(stored[1:]))
            return {tensor: stored if len(stored) == 3 and joined == shape else shape}
        # Gemma 2 2B stores these matrices untransposed, all later models transposed.
        straight, turned = (2, *shape), (2, *shape[::-1])
        return {tensor: straight if stored == straight else turned}

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Our parameter `name` in the checkpoint's dtype."""
        tensor, half = flax_tensor(name)
        stored = self._restore(tensor)
        if half is None:
            return stored.reshape(shape)
        return stored[half] if stored.shape[1:] == shape != shape[::-1] else stored[half].T

    def _restore(self, tensor: str) -> np.ndarray:
        from orbax import checkpoint as ocp

        path = self._paths[tensor]
        only = ocp.args.PyTreeRestore(
            item=_nested(path, 0),
            restore_args=_nested(path, ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                found: Any = checkpointer.restore(self._place, args=only)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{tensor} in {self._place} is damaged: {error}") from None
        for key in path:
            found = found[key]
        return found


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A `config.json` for a checkpoint with these tensors.

    Raises:
        ValueError: if no published Gemma has these shapes.
    """
    layers = {match[1] for name in shapes if (match := re.match(r"layer_(\d+)/", name))}
    vocab, embed = shapes.get("embedder/input_embedding", (0, 0))
    attn = "layer_0/attn"
    family = "gemma3_text" if f"{attn}/_query_norm/scale" in shapes else "gemma2"
    family = GEMMA4 if "layer_0/skip_scale" in shapes else family
    known = _PUBLISHED.get((family, len(layers), embed))
    joined = shapes.get(f"{attn}/qkv_einsum/w", (3, 0, 0, 0))
    heads, _, head_dim = shapes.get(f"{attn}/q_einsum/w", joined[1:])
    kv_heads = shapes.get(f"{attn}/kv_einsum/w", joined)[1]
    hidden = shapes.get("layer_0/mlp/linear/w", (0, 0))[0]
    if known is None or not (heads and kv_heads and hidden):
        raise ValueError(
            f"there is no config.json, and no published Gemma 2, 3 or 4 has {len(layers)} layers "
            f"of width {embed}; put the model's config.json beside the checkpoint"
        )
    return {
        "model_type": family,
        "num_hidden_layers": len(layers),
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **known,
    }


def _leaves(place: Path) -> dict[tuple[str, ...], Any]:
    from orbax import checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(place)
        tree = getattr(found, "item_metadata", found)
        flat, _ = jax.tree_util.tree_flatten_with_path(getattr(tree, "tree", tree))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged: {error}") from None
    if not flat:
        raise ValueError(f"{place} is damaged: orbax finds no tensors in it")
    return {tuple(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in flat}


def _name(path: str) -> str:
    """The name of a tensor in a flat or nested tree, such as `layer_0/attn/q_einsum/w`."""
    name = _TOP.sub("", path)
    for newer, ours in _NEWER.items():
        name = name.replace(newer, ours)
    return name


def _nested(path: tuple[str, ...], leaf: Any) -> Any:
    for key in reversed(path):
        leaf = {key: leaf}
    return leaf


def flax_tensor(name: str) -> tuple[str, int | None]:
    """The tensor that holds one of our parameters, and the index of the half if it holds two."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    layer, own = ("", name) if match is None else (f"layer_{match[1]}/", match[2])
    kind = own.removeprefix("mlp.").removesuffix(".kernel")
    if kind in _GATING:
        return f"{layer}mlp/gating_einsum/w", _GATING[kind]
    return layer + _NAMES.get(own, own.replace(".", "/")), None
