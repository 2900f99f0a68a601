"""Loads Gemma's weights, whatever the checkpoint's format, one parameter after the other.

What is read goes straight to its place on the devices; in host memory there is never more than one
parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.flax_checkpoint import FlaxCheckpoint, config_of
from pipeline.compute.model.gemma import Architecture
from pipeline.compute.model.safetensors_folder import SafetensorsFolder
from pipeline.inputs.hub import hf_folder
from pipeline.inputs.hub.hf_config import text_config

READABLE = ("float32", "float16", "bfloat16")
"""Types that weights may be stored in."""

Source = SafetensorsFolder | FlaxCheckpoint
"""A checkpoint in one format: its tensors, which of them make up a parameter, and the parameter."""


def read_text_config(folder: Path) -> dict[str, Any]:
    """The text model's whole configuration, as `hf_config.text_config` gives it.

    A flax checkpoint without `config.json` is known by its shapes.

    Raises:
        FileNotFoundError: if folder or configuration are absent.
        ValueError: if it is no JSON, or no Gemma that is computed here.
    """
    checkpoint = _flax(folder)
    if checkpoint is not None and not (folder / "config.json").is_file():
        try:
            return text_config(config_of(checkpoint.shapes))
        except ValueError as error:
            raise ValueError(f"model.path: {folder}: {error}") from None
    return hf_folder.read_text_config(folder)


def read_architecture(folder: Path, *, dtype: jnp.dtype) -> Architecture:
    """The architecture of a folder's model.

    Raises:
        FileNotFoundError: as `read_text_config`.
        ValueError: likewise.
    """
    return architecture(read_text_config(folder), dtype=dtype)


def load(folder: Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """All that `stream` yields."""
    return dict(stream(folder, shapes))


def stream(
    folder: Path, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, jax.Array]]:
    """The parameters named by `shapes`, in their order, with their types and shardings.

    Nothing is read before everything has been checked. Each parameter is on the devices, each of
    which is sent its part only, and gone from the host before the next one is read. Without a
    sharding it goes to JAX's default device.

    Raises:
        FileNotFoundError: if a file is absent.
        ValueError: listing every tensor that is missing, surplus, or of another shape or kind.
    """
    checkpoint = _flax(folder)
    source = SafetensorsFolder(folder) if checkpoint is None else checkpoint
    _check(folder, source, shapes)
    return _stream(source, shapes)


def _stream(
    source: Source, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, jax.Array]]:
    for name, spec in shapes.items():
        value = source.read(name, spec.shape).astype(spec.dtype, copy=False)
        # Never the file's own pages: they would change with the file.
        array = jax.device_put(value, spec.sharding, may_alias=False)
        yield name, jax.block_until_ready(array)


def _flax(folder: Path) -> FlaxCheckpoint | None:
    place = hf_folder.flax_folder(folder) if folder.is_dir() else None
    return None if place is None else FlaxCheckpoint(place)


def _check(folder: Path, source: Source, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for name, spec in shapes.items():
        wanted |= source.wanted(name, spec.shape)
    problems = [f"missing: {t} {wanted[t]}" for t in wanted if t not in source.shapes]
    problems += [f"surplus: {t}" for t in sorted(source.shapes.keys() - wanted - source.ignored)]
    for tensor, shape in wanted.items():
        if tensor not in source.shapes:
            continue
        found, dtype = source.shapes[tensor], source.dtypes[tensor]
        if found != shape:
            problems.append(f"shape of {tensor}: {found}, the configuration asks for {shape}")
        if dtype not in READABLE:
            problems.append(f"type of {tensor}: {dtype}, read are {', '.join(READABLE)}")
    if problems:
        raise ValueError(
            f"model.path: {folder} does not fit its configuration:\n  " + "\n  ".join(problems)
        )
