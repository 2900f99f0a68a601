"""The golden folders in every supported format: other names and dtypes, several files, flax."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax import checkpoint as ocp
from safetensors.numpy import load_file, save_file

from pipeline.compute.model import save
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.tensors import entry
from tests import tiny

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
    shape = architecture(config, dtype=jnp.dtype("float32"))
    policy = Policy(shape, lora=tiny.LORA, mesh=make_mesh(jax.devices()[:1]))
    rows = ((name, entry(name), spec.shape) for name, spec in policy.plain_shapes.items())
    tree = save.flax_tree(
        (name, np.asarray(row.read([tensors[one] for one in row.tensors], size)))
        for name, row, size in rows
    )
    if not turned:
        for module, leaves in tree.items():
            if module.endswith("gating_einsum"):
                leaves["w"] = leaves["w"].swapaxes(1, 2)
    if config["model_type"] != "gemma4_text":
        return tree
    # Kaggle's names in a Gemma 4.
    embedder = tree["transformer/embedder"]
    embedder["per_layer_embeddings"] = embedder.pop("per_layer_input_embedding")
    return {module.replace("attn/_", "attn/"): leaves for module, leaves in tree.items()}


def save_flax(tree: Any, place: Path) -> None:
    """Writes a tree as orbax's standard checkpointer does."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(place, tree)
