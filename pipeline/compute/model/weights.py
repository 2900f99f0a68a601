"""Loads Gemma's weights from any supported format, one parameter after another.

Parameters go directly to their devices; host memory holds at most one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.compute.model.flax_checkpoint import FlaxCheckpoint, config_of
from pipeline.compute.model.tensors import entry
from pipeline.data.models import hf_folder
from pipeline.data.models.hf_config import text_config

_EXPONENTS = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of the exponent, all of which are set in NaN and infinity."""


class SafetensorsFolder:
    """The text model's tensors in a Hugging Face folder; files are memory-mapped.

    Attributes:
        shapes: shapes of the tensors, by their names in a folder of the text model alone.
        dtypes: NumPy names of readable dtypes, otherwise safetensors' names.
        ignored: optional tensors that are not read.
    """

    # Some folders store the tied head, which equals the embedding.
    ignored = frozenset({"lm_head.weight"})

    def __init__(self, folder: Path) -> None:
        """Reads the headers.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if one is damaged.
        """
        self._tensors, _ = hf_folder.text_tensors(folder)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}

    def wanted(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The tensors that make up our parameter `name`, and their shapes."""
        row = entry(name)
        return dict.fromkeys(row.tensors, row.stored_shape(shape))

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Our parameter `name` in the folder's dtype; a view of the mapped file if possible."""
        row = entry(name)
        return row.read([self._tensors[tensor].data() for tensor in row.tensors], shape)


Source = SafetensorsFolder | FlaxCheckpoint
"""A checkpoint: its tensors, the tensors of each parameter, and the parameters."""


def read_text_config(folder: Path) -> dict[str, Any]:
    """The text model's complete configuration, as returned by `hf_config.text_config`.

    A flax checkpoint without `config.json` is identified by its shapes.

    Raises:
        FileNotFoundError: if the folder or the configuration is missing.
        ValueError: if it is not JSON, or not a supported Gemma.
    """
    checkpoint = _flax(folder)
    if checkpoint is not None and not (folder / "config.json").is_file():
        try:
            return text_config(config_of(checkpoint.shapes))
        except ValueError as error:
            raise ValueError(f"model.path: {folder}: {error}") from None
    return hf_folder.read_text_config(folder)


def stream(
    folder: Path, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, jax.Array]]:
    """The parameters named by `shapes`, in their order, with their dtypes and shardings.

    Checks all tensors before it reads any. Each device receives only its shard. A parameter is on
    the devices and freed on the host before the next one is read. Without a sharding it goes to
    JAX's default device.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: listing every tensor that is missing, surplus, or of another shape or dtype; or
            naming one that has a number that is not finite.
    """
    checkpoint = _flax(folder)
    source = SafetensorsFolder(folder) if checkpoint is None else checkpoint
    _check(folder, source, shapes)
    return _stream(folder, source, shapes)


def _stream(
    folder: Path, source: Source, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, jax.Array]]:
    for name, spec in shapes.items():
        value = source.read(name, spec.shape)
        exponent = _EXPONENTS[str(value.dtype)]
        bits = value.view(f"uint{8 * value.itemsize}")
        if (bits & exponent).max() == exponent:
            tensors = " or ".join(source.wanted(name, spec.shape))
            raise ValueError(f"model.path: {folder}: {tensors} has NaN or infinite numbers")
        value = value.astype(spec.dtype, copy=False)
        # A copy: an alias of the mapped file would change with the file.
        array = jax.device_put(value, spec.sharding, may_alias=False)
        yield name, jax.block_until_ready(array)


def _flax(folder: Path) -> FlaxCheckpoint | None:
    place = hf_folder.flax_folder(folder) if folder.is_dir() else None
    return None if place is None else FlaxCheckpoint(place)


def _check(folder: Path, source: Source, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for name, spec in shapes.items():
        wanted |= source.wanted(name, spec.shape)
    hf_folder.check_tensors(
        folder, wanted, shapes=source.shapes, dtypes=source.dtypes, optional=source.ignored
    )
