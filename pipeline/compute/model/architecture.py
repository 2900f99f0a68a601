"""The shape of a Gemma, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from tunix.models.gemma3 import model as gemma3

from pipeline.compute.model.gemma import Architecture
from pipeline.inputs.hub.hf_config import SLIDING, text_config


def architecture(hf: Mapping[str, Any], *, dtype: jnp.dtype) -> Architecture:
    """Reads a Hugging Face `config.json` of Gemma 2 or 3; of a multimodal one its text part.

    Raises:
        ValueError: one line with everything in it that this implementation does not compute.
    """
    text = text_config(hf)
    # Gemma 3 has norms of queries and keys, and its local layers a RoPE of their own.
    newer = text["model_type"] != "gemma2"
    factor = (text["rope_scaling"] or {"factor": 1.0})["factor"]
    config = gemma3.ModelConfig(
        num_layers=text["num_hidden_layers"],
        num_embed=text["vocab_size"],
        embed_dim=text["hidden_size"],
        hidden_dim=text["intermediate_size"],
        num_heads=text["num_attention_heads"],
        head_dim=text["head_dim"],
        num_kv_heads=text["num_key_value_heads"],
        sliding_window_size=text["sliding_window"],
        local_base_frequency=text["rope_local_base_freq" if newer else "rope_theta"],
        global_base_frequency=text["rope_theta"],
        local_scale_factor=1.0 if newer else factor,
        global_scale_factor=factor,
        param_dtype=dtype,
    )
    return Architecture(
        config=config,
        local=tuple(kind == SLIDING for kind in text["layer_types"]),
        query_scale=text["query_pre_attn_scalar"] ** -0.5,
        query_key_norm=newer,
        attention_softcap=text["attn_logit_softcapping"],
        final_softcap=text["final_logit_softcapping"],
    )
