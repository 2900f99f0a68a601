"""Numbers of a folder that are not finite; `test_formats` has the folders that are read."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from pipeline.compute.model import weights
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import make_policy
from tests import tiny
from tests.pipeline.compute.model import formats


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("bfloat16", -np.inf)])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, value: float):
    folder = formats.retyped(formats.copy("gemma3", tmp_path), dtype)
    mesh = make_mesh(jax.devices()[:1])
    shapes = make_policy(folder, dtype="float32", lora=tiny.LORA, mesh=mesh).plain_shapes
    name = "model.layers.1.self_attn.v_proj.weight"

    def edit(tensors: formats.Tensors) -> formats.Tensors:
        tensors[name][3, 4] = value
        return tensors

    formats.rewrite(folder, edit)
    with pytest.raises(ValueError, match=rf"k_proj\.weight or {name} has NaN or infinite numbers$"):
        dict(weights.stream(folder, shapes))
