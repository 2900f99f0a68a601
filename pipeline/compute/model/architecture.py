"""The architecture of a Gemma, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from tunix.models.gemma3 import model as gemma3

from pipeline.data.models.hf_config import FULL, GEMMA4, SLIDING, read_model_shape, text_config
from pipeline.data.models.model_shape import ModelShape


@dataclass(frozen=True)
class Architecture:
    """The architecture of a model.

    Attributes:
        shape: its sizes and soft caps.
        config: configuration of Tunix's Gemma 3, with sizes, RoPE and dtype.
        query_scale: queries are multiplied by this before attention.
        global_rotary: share of a head that RoPE rotates in global layers.
    """

    shape: ModelShape
    config: gemma3.ModelConfig
    query_scale: float
    global_rotary: float = 1.0

    def window(self, layer: int) -> int | None:
        """Positions that a query of `layer` attends to; None: all."""
        return self.shape.window if self.shape.local[layer] else None

    def layer_config(self, layer: int) -> gemma3.ModelConfig:
        """`config` with the widths of a layer."""
        shape = self.shape
        widths = {"head_dim": shape.head_dim_of(layer), "hidden_dim": shape.hidden_of(layer)}
        return replace(self.config, **widths)


def architecture(hf: Mapping[str, Any], *, dtype: jnp.dtype) -> Architecture:
    """Reads a Hugging Face `config.json` of Gemma 2, 3 or 4; the text model of a multimodal one.

    Raises:
        ValueError: one line that lists every unsupported setting.
    """
    text = text_config(hf)
    shape = read_model_shape(text)
    ropes = _ropes(text)
    config = gemma3.ModelConfig(
        num_layers=shape.layers,
        num_embed=shape.vocab,
        embed_dim=shape.embed,
        hidden_dim=shape.hidden,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        sliding_window_size=shape.window,
        **ropes,
        param_dtype=dtype,
    )
    if text["model_type"] != GEMMA4:
        return Architecture(shape, config, query_scale=text["query_pre_attn_scalar"] ** -0.5)
    rotary = text["rope_parameters"][FULL]["partial_rotary_factor"]
    return Architecture(shape, config, query_scale=1.0, global_rotary=rotary)


def _ropes(text: Mapping[str, Any]) -> dict[str, float]:
    """RoPE settings of local and of global layers."""
    if text["model_type"] == GEMMA4:
        local, whole = (text["rope_parameters"][kind] for kind in (SLIDING, FULL))
        return {
            "local_base_frequency": local["rope_theta"],
            "global_base_frequency": whole["rope_theta"],
            "local_scale_factor": 1.0,
            "global_scale_factor": whole.get("factor", 1.0),
        }
    # Gemma 3 has a separate RoPE for local layers.
    factor = (text["rope_scaling"] or {"factor": 1.0})["factor"]
    is_gemma3 = text["model_type"] != "gemma2"
    return {
        "local_base_frequency": text["rope_local_base_freq" if is_gemma3 else "rope_theta"],
        "global_base_frequency": text["rope_theta"],
        "local_scale_factor": 1.0 if is_gemma3 else factor,
        "global_scale_factor": factor,
    }
