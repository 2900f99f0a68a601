"""Incrementally written safetensors files, read with the library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.data.models.tensor_files import TensorSpec, plan_shards, write_shards

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tensors(specs: list[TensorSpec]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(spec.shape).astype(DTYPES[spec.dtype]) for spec in specs]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shard_bytes", [10**9, 100])
def test_the_library_reads_what_was_written(tmp_path: Path, dtype: str, shard_bytes: int):
    specs = [TensorSpec(f"t{n}", shape, dtype) for n, shape in enumerate([(3, 5), (7,), (2, 2, 9)])]
    values = tensors(specs)
    # Transposed views, as when a model is written.
    values[0] = np.asfortranarray(values[0])
    write_shards(tmp_path, plan_shards(specs, shard_bytes=shard_bytes), iter(values))
    files = sorted(tmp_path.glob("*.safetensors"))
    found: dict[str, np.ndarray] = {}
    for file in files:
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 8 == 0
        found |= load_file(file)
    assert len(files) == (1 if shard_bytes == 10**9 else 2)
    for spec, value in zip(specs, values, strict=True):
        assert str(found[spec.name].dtype) == dtype
        np.testing.assert_array_equal(found[spec.name], value)


def test_each_tensor_is_written_before_the_next_is_requested(tmp_path: Path):
    specs = [TensorSpec(str(n), (100_000,), "float32") for n in range(4)]

    def one_by_one() -> Iterator[np.ndarray]:
        for number, value in enumerate(tensors(specs)):
            written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
            assert written >= number * 400_000
            yield value

    write_shards(tmp_path, plan_shards(specs, shard_bytes=800_000), one_by_one())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 1_600_000
    assert index["weight_map"]["3"] == "model-00002-of-00002.safetensors"
