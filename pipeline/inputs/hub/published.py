"""Sizes of the models that Google has published. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

_GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "head_dim": 256, "vocab_size": 262_144}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-270m": _GEMMA3
    | {
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    },
    "gemma-3-1b": _GEMMA3
    | {
        "num_hidden_layers": 26,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    },
    "gemma-3-4b": _GEMMA3
    | {
        "vocab_size": 262_208,
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
    },
    # All sizes are transformers' defaults.
    "gemma-2-2b": {"model_type": "gemma2"},
}
"""Memory-relevant settings of the `config.json` files that Google has published, by model name."""
