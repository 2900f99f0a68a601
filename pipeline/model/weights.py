"""Loads Gemma weights from Hugging Face folders; what is read goes to the devices one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from pipeline.hf_folder import read_config, weight_files
from pipeline.model.architecture import architecture
from pipeline.model.gemma import Architecture
from pipeline.model.tensors import Entry, entry


def read_architecture(folder: Path, *, dtype: jnp.dtype) -> Architecture:
    """The architecture that a folder's `config.json` describes.

    Raises:
        FileNotFoundError: if the folder or the file is absent.
        ValueError: if it is no JSON, or no Gemma 3 that is computed here.
    """
    return architecture(read_config(folder), dtype=dtype)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a folder is.

    Raises:
        FileNotFoundError: if weights or one of the files that the index names are absent.
        ValueError: if a file cannot be read.
    """
    where: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                where.update(dict.fromkeys(file.keys(), path))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    return where


def load(
    folder: Path,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    sharding: jax.sharding.Sharding,
) -> dict[str, jax.Array]:
    """The parameters named by `shapes`, in their types and with `sharding`.

    Raises:
        FileNotFoundError: if a file is absent.
        ValueError: listing every tensor that is missing, surplus or of another shape.
    """
    where = tensor_files(folder)
    entries = {name: entry(name) for name in shapes}
    _check(folder, where, entries, shapes)
    params = {}
    for name, row in entries.items():
        spec = shapes[name]
        stored = [_read(where[tensor], tensor) for tensor in row.tensors]
        value = row.read(stored, spec.shape).astype(spec.dtype)
        params[name] = jax.device_put(value, sharding)
    return params


def _read(path: Path, tensor: str) -> np.ndarray:
    with safe_open(path, framework="numpy") as file:
        return file.get_tensor(tensor)


def _check(
    folder: Path,
    where: Mapping[str, Path],
    entries: Mapping[str, Entry],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    wanted = {
        tensor: row.stored_shape(shapes[name].shape)
        for name, row in entries.items()
        for tensor in row.tensors
    }
    # A tied head that is written out all the same is the embedding once more.
    surplus = sorted(where.keys() - wanted.keys() - {"lm_head.weight"})
    problems = [f"missing: {t} {wanted[t]}" for t in wanted if t not in where]
    problems += [f"surplus: {t}" for t in surplus]
    for tensor, shape in wanted.items():
        if tensor in where:
            with safe_open(where[tensor], framework="numpy") as file:
                found = tuple(file.get_slice(tensor).get_shape())
            if found != shape:
                problems.append(f"shape of {tensor}: {found}, config.json asks for {shape}")
    if problems:
        raise ValueError(f"{folder} does not fit its config.json:\n  " + "\n  ".join(problems))
