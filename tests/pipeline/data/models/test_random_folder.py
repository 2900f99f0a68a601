"""Model folders with random weights load like real ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from pipeline.data.models.find_shape import hf_config_of
from pipeline.data.models.hf_config import read_model_shape
from pipeline.data.models.hf_folder import check_folder
from pipeline.data.models.model_shape import ModelShape
from pipeline.data.models.random_folder import write_random_weights
from tests import tiny


def write(folder: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> ModelShape:
    shape = read_model_shape(tiny.hf_config(**{"num_hidden_layers": 2} | changes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config_of(shape)))
    write_random_weights(folder, shape, dtype=dtype, seed=seed)
    return shape


def load(folder: Path, *, dtype: str = "float32") -> dict[str, np.ndarray]:
    mesh = make_mesh(jax.devices()[:1])
    _, base = open_policy(folder, dtype=dtype, lora=tiny.LORA, mesh=mesh)
    return {name: np.asarray(value) for name, value in base.items()}


def test_weights_of_another_shape_are_refused_without_reading_them(tmp_path: Path):
    shape = write(tmp_path)
    config = tmp_path / "config.json"
    other = json.loads(config.read_text())
    other["num_attention_heads"] *= 2
    config.write_text(json.dumps(other))
    was, now = shape.heads * shape.head_dim, 2 * shape.heads * shape.head_dim
    told = (
        f"model.path: {tmp_path}: shape of model.layers.0.self_attn.q_proj.weight: "
        f"({was}, {shape.embed}), the configuration requires ({now}, {shape.embed}), and 3 more "
        "differ"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        check_folder(tmp_path)


@pytest.mark.parametrize("changes", [{}, tiny.GEMMA2, tiny.GEMMA4, {"num_key_value_heads": 4}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_every_parameter_of_its_shape(tmp_path: Path, changes: dict[str, Any], dtype: str):
    shape = write(tmp_path, dtype=dtype, **changes)
    assert check_folder(tmp_path) == []
    base = load(tmp_path, dtype=dtype)
    assert sum(value.size for value in base.values()) == shape.parameters
    assert {str(value.dtype) for value in base.values()} == {dtype}
    size = (tmp_path / "model.safetensors").stat().st_size
    bytes_of_weights = shape.base_bytes(dtype)
    assert bytes_of_weights < size < bytes_of_weights + 2**16
