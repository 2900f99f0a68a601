"""The golden folders in every supported format: other names and dtypes, several files, flax."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from orbax import checkpoint as ocp
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[3] / "golden"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, np.ndarray]


def copy(name: str, folder: Path) -> Path:
    """A copy of a golden folder's model."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", SINGLE):
        shutil.copyfile(GOLDEN / name / file, folder / file)
    return folder


def rewrite(folder: Path, edit: Callable[[Tensors], Tensors]) -> Path:
    """Replaces the single file's tensors by the result of `edit`."""
    tensors = edit(load_file(folder / SINGLE))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / SINGLE)
    return folder


def retyped(folder: Path, dtype: str) -> Path:
    """Converts all tensors to another dtype."""
    return rewrite(folder, lambda t: {k: v.astype(jnp.dtype(dtype)) for k, v in t.items()})


def renamed(folder: Path, prefixes: Mapping[str, str]) -> Path:
    """Replaces the prefixes of all tensor names."""

    def new(name: str) -> str:
        for old, prefix in prefixes.items():
            if name.startswith(old):
                return prefix + name.removeprefix(old)
        return name

    return rewrite(folder, lambda t: {new(k): v for k, v in t.items()})


def sharded(folder: Path, *, count: int = 3) -> Path:
    """Splits the tensors into several files with an index, as transformers does."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    where = {name: names[n % count] for n, name in enumerate(tensors)}
    for file in names:
        save_file({k: v for k, v in tensors.items() if where[k] == file}, folder / file)
    size = sum(v.nbytes for v in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def with_unused(folder: Path) -> Path:
    """Adds the unused keys and values that a published multimodal Gemma 4 has."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    layers = text["num_hidden_layers"]

    def add(tensors: Tensors) -> Tensors:
        for layer in range(layers - text["num_kv_shared_layers"], layers):
            at = f"model.language_model.layers.{layer}.self_attn"
            query, norm = tensors[f"{at}.q_proj.weight"], tensors[f"{at}.q_norm.weight"]
            rows = len(query) // text["num_attention_heads"] * text["num_key_value_heads"]
            for name, value in (
                *((f"{kind}_proj", query[:rows]) for kind in "kv"),
                ("k_norm", norm),
            ):
                tensors[f"{at}.{name}.weight"] = value + 1
        return tensors

    return rewrite(folder, add)


def flax_tree(tensors: Tensors, config: Mapping[str, Any], *, turned: bool) -> dict[str, Any]:
    """A text model's tensors in the gemma library's tree, with flat names as on Kaggle.

    Args:
        tensors: Hugging Face's.
        config: Hugging Face's, with all sizes.
        turned: whether gate and up projections are stored as `hidden embed`, as in all models but
            Gemma 2 2B.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    embed, is_gemma4 = config["hidden_size"], config["model_type"] == "gemma4_text"

    def split(stored: np.ndarray, count: int) -> np.ndarray:
        return stored.reshape(count, -1, embed).transpose(0, 2, 1)

    tree: dict[str, Any] = {
        "transformer/embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "transformer/final_norm": {"scale": tensors["model.norm.weight"]},
    }
    if is_gemma4:
        tree |= _per_layer_tree(tensors, tree, layers=config["num_hidden_layers"])
    norms = {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn/_query_norm": "self_attn.q_norm",
        "attn/_key_norm": "self_attn.k_norm",
    }
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"transformer/layer_{layer}", f"model.layers.{layer}"
        for module, norm in norms.items():
            if f"{theirs}.{norm}.weight" in tensors:
                # Gemma 4 has no underscores.
                name = module.replace("_", "", 1) if is_gemma4 and "attn/" in module else module
                tree[f"{ours}/{name}"] = {"scale": tensors[f"{theirs}.{norm}.weight"]}
        query, out = (tensors[f"{theirs}.self_attn.{kind}_proj.weight"] for kind in "qo")
        head_dim = len(query) // heads
        # Layers that share those of another layer have some, too, and do not use them.
        unused = np.ones((kv_heads * head_dim, embed), query.dtype)
        key, value = (
            tensors.get(f"{theirs}.self_attn.{kind}_proj.weight", unused) for kind in "kv"
        )
        pair = [split(x, kv_heads) for x in (key, value)]
        tree[f"{ours}/attn/q_einsum"] = {"w": split(query, heads)}
        tree[f"{ours}/attn/kv_einsum"] = {"w": np.stack(pair)}
        tree[f"{ours}/attn/attn_vec_einsum"] = {"w": out.T.reshape(heads, head_dim, embed)}
        gates = [tensors[f"{theirs}.mlp.{kind}_proj.weight"] for kind in ("gate", "up")]
        stacked = np.stack([gate if turned else gate.T for gate in gates])
        tree[f"{ours}/mlp/gating_einsum"] = {"w": stacked}
        tree[f"{ours}/mlp/linear"] = {"w": tensors[f"{theirs}.mlp.down_proj.weight"].T}
    return tree


def _per_layer_tree(tensors: Tensors, tree: dict[str, Any], *, layers: int) -> dict[str, Any]:
    """What only a Gemma 4 has."""
    embedder = "transformer/embedder"
    table = tensors["model.embed_tokens_per_layer.weight"]
    projection = tensors["model.per_layer_model_projection.weight"].T
    norm = tensors["model.per_layer_projection_norm.weight"]
    tree[embedder]["per_layer_embeddings"] = table.reshape(len(table), layers, -1)
    found: dict[str, Any] = {
        f"{embedder}/per_layer_model_projection": {
            "w": projection.reshape(len(projection), layers, -1)
        },
        f"{embedder}/per_layer_projection_norm": {"scale": norm},
    }
    for layer in range(layers):
        ours, theirs = f"transformer/layer_{layer}", f"model.layers.{layer}"
        found[ours] = {"skip_scale": tensors[f"{theirs}.layer_scalar"]}
        for name in ("per_layer_input_gate", "per_layer_projection"):
            found[f"{ours}/{name}"] = {"w": tensors[f"{theirs}.{name}.weight"].T}
        scale = tensors[f"{theirs}.post_per_layer_input_norm.weight"]
        found[f"{ours}/post_per_layer_input_norm"] = {"scale": scale}
    return found


def save_flax(tree: Any, place: Path) -> None:
    """Writes a tree as orbax's standard checkpointer does."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(place, tree)
