"""Writes safetensors files tensor by tensor, with at most one tensor in memory.

Layout of a file: 8 bytes with the header's length, the header (JSON), the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from pipeline.data.models.hf_folder import INDEX, SINGLE, STORED_TYPES, StoredTensor

_SAFETENSORS_NAMES = {str(dtype): name for name, dtype in STORED_TYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: its name, shape and NumPy data type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


Spec = TensorSpec | StoredTensor
"""A tensor to write: of given values, or as it is stored in another file."""


def plan_shards(specs: Sequence[Spec], *, shard_bytes: int) -> list[list[Spec]]:
    """Splits the tensors into files of at most `shard_bytes`; a larger tensor gets its own file."""
    shards: list[list[Spec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.num_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.num_bytes
    return shards


def write_shards(
    folder: Path, shards: Sequence[Sequence[Spec]], tensors: Iterator[np.ndarray]
) -> None:
    """Writes `model.safetensors`, or several files and an index with Hugging Face's names.

    `tensors` are the values of each `TensorSpec`, in the order of `shards`; consumed one by one.
    """
    count = len(shards)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, tensors)
    assert next(tensors, None) is None
    if count > 1:
        pairs = zip(names, shards, strict=True)
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for shard in shards for spec in shard)},
            "weight_map": {spec.name: name for name, shard in pairs for spec in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, shard: Sequence[Spec], tensors: Iterator[np.ndarray]) -> None:
    with path.open("wb") as file:
        file.write(_header(shard))
        for spec in shard:
            if isinstance(spec, StoredTensor):
                file.write(spec.raw().data)
                continue
            value = next(tensors)
            assert (value.shape, str(value.dtype)) == (spec.shape, spec.dtype), spec
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _header(shard: Sequence[Spec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in shard:
        start, end = end, end + spec.num_bytes
        header[spec.name] = {
            "dtype": _SAFETENSORS_NAMES.get(spec.dtype, spec.dtype),
            "shape": spec.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # Align the tensors to 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
