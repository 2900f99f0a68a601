"""Files of a Hugging Face model folder: which there must be, and what config.json says. No JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        FileNotFoundError: if the folder or the file is absent.
        ValueError: if it is no JSON object.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path: no folder {folder}")
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"model.path: {folder} has no config.json; it is not a Hugging Face model folder"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model.path: {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"model.path: {path} is not a JSON object")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files.

    Raises:
        FileNotFoundError: naming the weight files that are absent.
        ValueError: if the index cannot be read.
    """
    index = folder / INDEX
    names = [SINGLE]
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"model.path: {index} is damaged: {error!r}") from None
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"model.path: {folder} lacks {', '.join(absent)}")
    return [folder / name for name in names]
