"""The architecture of a Gemma from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from tunix.models.gemma3 import model as gemma3

from pipeline.compute.model.gemma import Architecture
from pipeline.inputs.hub.model_shape import read_model_config


def architecture(hf: Mapping[str, Any], *, dtype: jnp.dtype) -> Architecture:
    """Reads a Hugging Face `config.json` of Gemma 2 or 3; the text model of a multimodal one.

    Raises:
        ValueError: one line that lists every unsupported setting.
    """
    settings = read_model_config(hf)
    shape = settings.shape
    config = gemma3.ModelConfig(
        num_layers=shape.layers,
        num_embed=shape.vocab,
        embed_dim=shape.embed,
        hidden_dim=shape.hidden,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        sliding_window_size=shape.window,
        local_base_frequency=settings.local_rope_theta,
        global_base_frequency=settings.global_rope_theta,
        local_scale_factor=settings.local_rope_factor,
        global_scale_factor=settings.global_rope_factor,
        param_dtype=dtype,
    )
    return Architecture(
        config=config,
        local=shape.local,
        query_scale=settings.query_scale,
        query_key_norm=shape.query_key_norm,
        attention_softcap=shape.attention_softcap,
        final_softcap=shape.final_softcap,
    )
