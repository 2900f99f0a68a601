"""Windows of the layers; the golden models show the other settings of a config.json."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tunix.models.gemma3 import model as gemma3

from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.gemma import Gemma
from pipeline.compute.model.sharding import make_mesh
from tests import tiny


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, [5]),
        ({"sliding_window_pattern": 3}, [2, 5]),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 6]}, [0]),
        (tiny.GEMMA2, [1, 3, 5]),
    ],
)
def test_windows_follow_the_pattern(changes: dict[str, Any], full: list[int]):
    found = architecture(tiny.hf_config(**changes), dtype=jnp.dtype("float32"))
    windows = [found.window(layer) for layer in range(7)]
    assert [layer for layer, window in enumerate(windows) if window is None] == full
    assert {window for window in windows if window is not None} == {tiny.WINDOW}
    mesh = make_mesh(jax.devices()[:1])
    model = nnx.eval_shape(lambda: Gemma(found, mesh=mesh, rngs=nnx.Rngs(0)))
    kinds = [layer.attn.attn_type for layer in model.layers]
    local = gemma3.AttentionType.LOCAL_SLIDING
    assert [kind == local for kind in kinds] == [window is not None for window in windows]
