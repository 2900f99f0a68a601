"""Writes random weights into a model's folder, for benchmarks. No JAX.

Sizes and data type equal those of the real model, so loading takes the same time and memory. The
weights are scaled like those at initialization: nothing overflows, and all tokens are likely.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from pipeline.data.models.hf_config import tensor_shapes
from pipeline.data.models.model_shape import ModelShape
from pipeline.data.models.tensor_files import TensorSpec, plan_shards, write_shards

_TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_SHARD_BYTES = 5 * 10**9
_AT_ONCE = 2**24
"""Random numbers that are generated at a time."""


def write_random_weights(folder: Path, shape: ModelShape, *, dtype: str, seed: int) -> None:
    """Writes the weights.

    Args:
        folder: of the model.
        shape: the model's shape.
        dtype: a value of `model.dtype`.
        seed: random seed of the weights.
    """
    specs = [TensorSpec(name, size, dtype) for name, size in tensor_shapes(shape)]
    rng = np.random.default_rng(seed)
    # Gemma 2 and 3 multiply by 1 plus the weight of a norm.
    identity = 1.0 if shape.value_norm else 0.0
    tensors = (_random_tensor(spec, rng, identity=identity) for spec in specs)
    write_shards(folder, plan_shards(specs, shard_bytes=_SHARD_BYTES), tensors)


def _random_tensor(spec: TensorSpec, rng: np.random.Generator, *, identity: float) -> np.ndarray:
    """`identity` for norms; for matrices a normal of variance 1 / inputs."""
    if len(spec.shape) == 1:
        return np.full(spec.shape, identity, _TYPES[spec.dtype])
    found = np.empty(spec.shape, _TYPES[spec.dtype])
    flat, scale = found.reshape(-1), np.float32(spec.shape[1] ** -0.5)
    for start in range(0, flat.size, _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        part[:] = rng.standard_normal(part.size, np.float32) * scale
    return found
