"""Writes a model folder in Hugging Face's format, or as a flax checkpoint in Google's.

The result is a text model, also for a base that is part of a multimodal model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from orbax import checkpoint as ocp

from pipeline.compute.model.tensors import entry
from pipeline.inputs.hub.hf_config import text_config
from pipeline.inputs.hub.hf_folder import read_config
from pipeline.inputs.hub.model_source import TOKENIZER_FILES
from pipeline.inputs.hub.tensor_files import TensorSpec, plan_shards, write_shards

FLAX = "flax"
"""Folder of the flax checkpoint inside an export."""
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
    folder: Path, parameters: Parameters, *, shapes: Shapes, dtype: str, shard_bytes: int
) -> None:
    """Writes safetensors with Hugging Face's names, one parameter in memory at a time.

    Args:
        folder: an existing folder.
        parameters: of dtype `dtype`, in the order of `shapes`.
        shapes: of all parameters, by our names.
        dtype: float32, bfloat16 or float16.
        shard_bytes: maximum file size; a larger model has several files and an index.
    """
    specs = [
        TensorSpec(tensor, row.stored_shape(shape), dtype)
        for row, shape in ((entry(name), shape) for name, shape in shapes.items())
        for tensor in row.tensors
    ]
    shards = plan_shards(specs, shard_bytes=shard_bytes)
    write_shards(folder, shards, _stored(parameters, shapes))


def _stored(parameters: Parameters, shapes: Shapes) -> Iterator[np.ndarray]:
    for (name, value), expected in zip(parameters, shapes, strict=True):
        assert name == expected, (name, expected)
        yield from entry(name).write(value)


def save_flax(folder: Path, parameters: Parameters) -> None:
    """Writes `folder/flax`, an orbax checkpoint in Kaggle's layout.

    Orbax needs the whole tree at once, so the model must fit into host memory.
    """
    tree: dict[str, dict[str, np.ndarray]] = {}
    gates: dict[str, np.ndarray] = {}
    for name, value in parameters:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name)
        if match is None:
            module, leaf = name.split(".")
            tree[f"transformer/{module}"] = {leaf: value}
            continue
        layer, module = f"transformer/layer_{match[1]}", match[2].replace(".", "/")
        if module == "mlp/down_proj":
            tree[f"{layer}/mlp/linear"] = {"w": value}
        elif module in {"mlp/gate_proj", "mlp/up_proj"}:
            gates[f"{layer}/{module}"] = value.T
        else:
            tree[f"{layer}/{module}"] = {match[3]: value}
    for name in [name for name in gates if name.endswith("/gate_proj")]:
        mlp = name.removesuffix("/gate_proj")
        both = np.stack([gates.pop(name), gates.pop(f"{mlp}/up_proj")])
        tree[f"{mlp}/gating_einsum"] = {"w": both}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / FLAX).absolute(), tree)


def save_config(folder: Path, config: Mapping[str, Any], *, dtype: str) -> None:
    """Writes `config.json` of the text model and, unless it exists, a generation config."""
    # Both spellings: transformers 5 reads `dtype`, 4 reads `torch_dtype`.
    whole = {**config, "tie_word_embeddings": True, "dtype": dtype, "torch_dtype": dtype}
    _write_json(folder / "config.json", whole)
    if not (folder / _GENERATION).is_file():
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {key: config[key] for key in keys if config.get(key) is not None}
        _write_json(folder / _GENERATION, ids | {"do_sample": True})


def copy_companions(folder: Path, *, like: Path, tokenizer: Path) -> None:
    """Copies the tokenizer, the generation config, the chat template and licences.

    Args:
        folder: the destination.
        like: the folder of the base.
        tokenizer: the tokenizer's file, which may be in another folder.
    """
    for path in sorted(tokenizer.parent.iterdir()):
        if path.is_file() and path.name in TOKENIZER_FILES:
            shutil.copyfile(path, folder / path.name)
    for path in sorted(like.iterdir()):
        # The model's own chat template replaces that of a tokenizer from another folder.
        if path.is_file() and path.name.startswith((_GENERATION, "chat_template", *_LICENCES)):
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
