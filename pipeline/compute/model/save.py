"""Writes a model folder in Hugging Face's format, or as a flax checkpoint in Google's.

An export of a multimodal model's folder has its other parts, too: their tensors, settings and files
are those of the base. A flax checkpoint is a text model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from orbax import checkpoint as ocp

from pipeline.compute.model.flax_checkpoint import flax_tensor
from pipeline.compute.model.tensors import entry
from pipeline.data.models.hf_config import text_config
from pipeline.data.models.hf_folder import read_config, text_tensors
from pipeline.data.models.model_source import PROCESSOR_FILES, TOKENIZER_FILES
from pipeline.data.models.tensor_files import Spec, TensorSpec, plan_shards, write_shards

FLAX = "flax"
"""Folder of the flax checkpoint inside an export."""
_EMBEDDER = "transformer/embedder"
_GENERATION = "generation_config.json"
_LICENCES = ("LICENSE", "NOTICE")

Shapes = Mapping[str, tuple[int, ...]]
Parameters = Iterable[tuple[str, np.ndarray]]
"""Our parameters one by one, with our names."""


def save_folder(folder: Path, params: Mapping[str, np.ndarray], *, like: Path) -> None:
    """Writes parameters from memory, in their dtype, as a Hugging Face folder with one file.

    Args:
        folder: an existing, empty folder.
        params: by our names.
        like: a folder with the configuration and `tokenizer.model`.
    """
    dtype = str(next(iter(params.values())).dtype)
    copy_companions(folder, like=like, tokenizer=like / "tokenizer.model")
    save_config(folder, text_config(read_config(like)), dtype=dtype)
    shapes = {name: value.shape for name, value in params.items()}
    whole = sum(value.nbytes for value in params.values())
    save_weights(folder, params.items(), shapes=shapes, dtype=dtype, shard_bytes=whole)


def save_weights(
    folder: Path,
    parameters: Parameters,
    *,
    shapes: Shapes,
    dtype: str,
    shard_bytes: int,
    within: Path | None = None,
) -> None:
    """Writes safetensors with Hugging Face's names, one parameter in memory at a time.

    Args:
        folder: an existing folder.
        parameters: of dtype `dtype`, in the order of `shapes`.
        shapes: of all parameters, by our names.
        dtype: float32, bfloat16 or float16.
        shard_bytes: maximum file size; a larger model has several files and an index.
        within: the folder of a multimodal model whose other tensors are written, too, unchanged,
            and whose names the parameters get; None: a text model.
    """
    text, others = ({}, []) if within is None else text_tensors(within)
    names = {plain: tensor.name for plain, tensor in text.items()}
    specs: list[Spec] = [
        TensorSpec(names.get(tensor, tensor), row.stored_shape(shape), dtype)
        for row, shape in ((entry(name), shape) for name, shape in shapes.items())
        for tensor in row.tensors
    ]
    # Wider numbers first, so that the offset of each tensor is a multiple of its number's size.
    carried = sorted(others, key=lambda tensor: -tensor.item_bytes)
    wide = [tensor for tensor in carried if tensor.item_bytes > np.dtype(dtype).itemsize]
    shards = plan_shards([*wide, *specs, *carried[len(wide) :]], shard_bytes=shard_bytes)
    write_shards(folder, shards, _stored(parameters, shapes))


def _stored(parameters: Parameters, shapes: Shapes) -> Iterator[np.ndarray]:
    for (name, value), expected in zip(parameters, shapes, strict=True):
        assert name == expected, (name, expected)
        yield from entry(name).write(value)


def save_flax(folder: Path, parameters: Parameters) -> None:
    """Writes `folder/flax`, an orbax checkpoint in Kaggle's layout.

    Orbax needs the whole tree at once, so the model must fit into host memory.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / FLAX).absolute(), flax_tree(parameters))


def flax_tree(parameters: Parameters) -> dict[str, dict[str, np.ndarray]]:
    """The tree of a flax checkpoint, with flat names."""
    tree: dict[str, dict[str, np.ndarray]] = {}
    gates: dict[str, dict[int, np.ndarray]] = {}
    for name, value in parameters:
        tensor, half = flax_tensor(name)
        module, _, leaf = tensor.rpartition("/")
        if half is None:
            tree.setdefault(f"transformer/{module}", {})[leaf] = value
            continue
        pair = gates.setdefault(module, {})
        pair[half] = value.T
        if len(pair) == 2:
            both = gates.pop(module)
            tree[f"transformer/{module}"] = {leaf: np.stack([both[0], both[1]])}
    _complete_gemma4(tree)
    return tree


def _complete_gemma4(tree: dict[str, dict[str, np.ndarray]]) -> None:
    """Adds an axis of layers to per-layer embeddings, and the keys and values of every layer.

    Layers that attend to those of another layer do not use theirs, which are zero here.
    """
    norm = tree.get(f"{_EMBEDDER}/per_layer_projection_norm")
    if norm is not None:
        width = norm["scale"].size
        for leaves, leaf in (
            (tree[_EMBEDDER], "per_layer_input_embedding"),
            (tree[f"{_EMBEDDER}/per_layer_model_projection"], "w"),
        ):
            leaves[leaf] = leaves[leaf].reshape(len(leaves[leaf]), -1, width)
    # The first layer has its own, in one matrix with the queries if there are as many.
    kinds = (f"transformer/layer_0/attn/{kind}" for kind in ("kv_einsum", "qkv_einsum"))
    kv_heads = next((tree[kind]["w"].shape[1] for kind in kinds if kind in tree), 0)
    for module in [module for module in tree if module.endswith("attn/q_einsum")]:
        attn, query = module.removesuffix("/q_einsum"), tree[module]["w"]
        if f"{attn}/kv_einsum" not in tree:
            zeros = np.zeros((2, kv_heads, *query.shape[1:]), query.dtype)
            tree[f"{attn}/kv_einsum"] = {"w": zeros}
            tree[f"{attn}/_key_norm"] = {"scale": zeros[0, 0, 0]}


def save_config(folder: Path, config: Mapping[str, Any], *, dtype: str) -> None:
    """Writes `config.json` and, unless it exists, a generation config.

    Args:
        folder: the destination.
        config: of a text model, or of a multimodal one.
        dtype: of the text model's weights.
    """
    # Both spellings: transformers 5 reads `dtype`, 4 reads `torch_dtype`.
    types = {"dtype": dtype, "torch_dtype": dtype}
    whole = {**config, "tie_word_embeddings": True, **types}
    if "text_config" in config:
        whole["text_config"] = {**config["text_config"], **types}
    _write_json(folder / "config.json", whole)
    if not (folder / _GENERATION).is_file():
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {key: config[key] for key in keys if config.get(key) is not None}
        _write_json(folder / _GENERATION, ids | {"do_sample": True})


def copy_companions(folder: Path, *, like: Path, tokenizer: Path, multimodal: bool = False) -> None:
    """Copies the tokenizer, the generation config, the chat template and licences.

    Args:
        folder: the destination.
        like: the folder of the base.
        tokenizer: the tokenizer's file, which may be in another folder.
        multimodal: whether the settings of images and sound are copied, too.
    """
    from_base = (_GENERATION, "chat_template", *_LICENCES, *(PROCESSOR_FILES if multimodal else ()))
    for path in sorted(tokenizer.parent.iterdir()):
        if path.is_file() and path.name in TOKENIZER_FILES:
            shutil.copyfile(path, folder / path.name)
    for path in sorted(like.iterdir()):
        # The model's own chat template replaces that of a tokenizer from another folder.
        if path.is_file() and path.name.startswith(from_base):
            shutil.copyfile(path, folder / path.name)
    # Under its standard name.
    shutil.copyfile(tokenizer, folder / f"tokenizer{tokenizer.suffix}")


def add_stop_tokens(folder: Path, *, stops: Sequence[int]) -> None:
    """Adds stop tokens to `eos_token_id` of `generation_config.json`.

    Without them a server would continue after the policy's stop token.
    """
    path = folder / _GENERATION
    given: dict[str, Any] = {}
    if path.is_file():
        given = json.loads(path.read_text(encoding="utf-8"))
    ends = given.get("eos_token_id", [])
    known = ends if isinstance(ends, list) else [ends]
    _write_json(path, {**given, "eos_token_id": list(dict.fromkeys([*known, *stops]))})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
