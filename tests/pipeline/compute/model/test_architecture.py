"""The architecture from a config.json, and the modules that are built from it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tunix.models.gemma3 import model as gemma3

from pipeline.compute.model.architecture import Architecture, architecture
from pipeline.compute.model.gemma import Gemma
from pipeline.compute.model.sharding import make_mesh
from tests import tiny


def read(**changes: Any) -> Architecture:
    return architecture(tiny.hf_config(**changes), dtype=jnp.dtype("float32"))


def test_every_setting_is_read():
    found = read(
        num_key_value_heads=1,
        query_pre_attn_scalar=16,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    config = found.config
    assert (found.query_scale, found.shape.query_key_norm) == (0.25, True)
    assert (found.shape.attention_softcap, found.shape.final_softcap) == (None, None)
    assert (config.num_layers, config.num_embed, config.embed_dim) == (7, tiny.VOCAB, 24)
    assert (config.hidden_dim, config.num_heads, config.head_dim) == (40, 4, 8)
    assert (config.num_kv_heads, config.sliding_window_size) == (1, tiny.WINDOW)
    assert (config.global_base_frequency, config.local_base_frequency) == (5e5, 2e4)
    assert (config.global_scale_factor, config.local_scale_factor) == (4.0, 1.0)
    assert config.param_dtype == jnp.float32


def test_gemma_2_is_read():
    found = read(**tiny.GEMMA2)
    assert (found.shape.attention_softcap, found.shape.final_softcap) == (4.0, 3.0)
    assert not found.shape.query_key_norm
    assert (found.config.global_base_frequency, found.config.local_base_frequency) == (1e4, 1e4)


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
    found = read(**changes)
    windows = [found.window(layer) for layer in range(7)]
    assert [layer for layer, window in enumerate(windows) if window is None] == full
    assert {window for window in windows if window is not None} == {tiny.WINDOW}
    mesh = make_mesh(jax.devices()[:1])
    model = nnx.eval_shape(lambda: Gemma(found, mesh=mesh, rngs=nnx.Rngs(0)))
    kinds = [layer.attn.attn_type for layer in model.layers]
    local = gemma3.AttentionType.LOCAL_SLIDING
    assert [kind == local for kind in kinds] == [window is not None for window in windows]


def test_gemma_2_has_the_parameters_of_gemma_3_without_query_and_key_norms():
    def names(**changes: Any) -> set[str]:
        return set(tiny.make_policy(num_hidden_layers=2, **changes).base_shapes)

    assert names() - names(**tiny.GEMMA2) == {
        f"layers.{n}.attn._{which}_norm.scale" for n in range(2) for which in ("query", "key")
    }
    assert names(**tiny.GEMMA2) < names()


def test_the_dtype_is_an_argument():
    policy = tiny.make_policy(dtype="bfloat16", num_hidden_layers=1, **tiny.GEMMA2)
    assert {shape.dtype for shape in policy.base_shapes.values()} == {jnp.dtype("bfloat16")}
