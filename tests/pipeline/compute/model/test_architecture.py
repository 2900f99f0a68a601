"""Windows of the layers; the golden models show the other settings of a config.json."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pipeline.compute.model.architecture import architecture
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
