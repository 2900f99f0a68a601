"""The architecture of a Gemma, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from tunix.models.gemma3 import model as gemma3

from pipeline.contracts.model_shape import ModelShape
from pipeline.inputs.hub.hf_config import text_config
from pipeline.inputs.hub.model_shape import read_model_shape


@dataclass(frozen=True)
class Architecture:
    """The architecture of a model.

    Attributes:
        shape: its sizes and soft caps.
        config: Tunix's configuration, with sizes, RoPE and dtype.
        query_scale: queries are multiplied by this before attention.
    """

    shape: ModelShape
    config: gemma3.ModelConfig
    query_scale: float

    def window(self, layer: int) -> int | None:
        """Positions that a query of `layer` attends to; None: all."""
        return self.shape.window if self.shape.local[layer] else None


def architecture(hf: Mapping[str, Any], *, dtype: jnp.dtype) -> Architecture:
    """Reads a Hugging Face `config.json` of Gemma 2 or 3; the text model of a multimodal one.

    Raises:
        ValueError: one line that lists every unsupported setting.
    """
    text = text_config(hf)
    shape = read_model_shape(text)
    # Gemma 3 has a separate RoPE for local layers.
    factor = (text["rope_scaling"] or {"factor": 1.0})["factor"]
    is_gemma3 = shape.query_key_norm
    config = gemma3.ModelConfig(
        num_layers=shape.layers,
        num_embed=shape.vocab,
        embed_dim=shape.embed,
        hidden_dim=shape.hidden,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        sliding_window_size=shape.window,
        local_base_frequency=text["rope_local_base_freq" if is_gemma3 else "rope_theta"],
        global_base_frequency=text["rope_theta"],
        local_scale_factor=1.0 if is_gemma3 else factor,
        global_scale_factor=factor,
        param_dtype=dtype,
    )
    return Architecture(shape, config, query_scale=text["query_pre_attn_scalar"] ** -0.5)
