"""Writes parameters as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pipeline.hf_folder import INDEX, SINGLE, read_config
from pipeline.model.tensors import entry


def stored_tensors(params: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Our parameters under Hugging Face's names and in its shapes."""
    for name, value in params.items():
        row = entry(name)
        for tensor, stored in zip(row.tensors, row.write(value), strict=True):
            yield tensor, np.ascontiguousarray(stored)


def save_folder(folder: Path, params: Mapping[str, np.ndarray], *, like: Path) -> None:
    """Writes a Hugging Face folder: weights, and configuration and tokenizer from `like`.

    Args:
        folder: an existing, empty folder.
        params: by our names; their type is written and named in `config.json`.
        like: the folder the model came from.
    """
    for path in sorted(like.iterdir()):
        if path.is_file() and path.suffix not in {".safetensors", ".bin"} and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    config = read_config(like)
    dtype = str(next(iter(params.values())).dtype)
    config = {key: value for key, value in config.items() if key not in {"dtype", "torch_dtype"}}
    # Both spellings: transformers 5 reads `dtype`, 4 reads `torch_dtype`.
    config |= {"dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(dict(stored_tensors(params)), folder / SINGLE, metadata={"format": "pt"})
