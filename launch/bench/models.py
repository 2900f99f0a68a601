"""Shapes of the benchmarked models, in the form of their `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.inputs.hub.model_shape import PUBLISHED

if TYPE_CHECKING:
    from configs.schema import Config

VOCAB = 262_144
"""Vocabulary size of all models but the small policy, without image tokens."""

_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}

MODELS: dict[str, dict[str, Any]] = {
    "gemma3_1b": _GEMMA3 | PUBLISHED["gemma-3-1b"],
    "gemma3_4b": _GEMMA3
    | PUBLISHED["gemma-3-4b"]
    | {"vocab_size": VOCAB, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    # A small body with the real vocabulary: the cost of the vocabulary, on two CPU cores.
    "small_body": _GEMMA3
    | {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
    },
    # A small Gemma 3: the cost of a sampler's loop.
    "small_policy": _GEMMA3
    | {
        "vocab_size": 512,
        "num_hidden_layers": 7,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
    },
}
"""By name."""

PROMPT = 256
"""Tokens of a prompt; the rest of the length is the completion."""


def own_sizes(model: str) -> tuple[int, int]:
    """Returns the widths of the hidden states and of the MLP."""
    return MODELS[model]["hidden_size"], MODELS[model]["intermediate_size"]


def preset(model: str) -> Path:
    """Returns the path of the model's v5e-8 preset."""
    import configs

    return Path(configs.__file__).parent / f"{model}_gsm8k_v5e8.toml"


def bench_config(model: str, *, length: int, **settings: Any) -> Config:
    """Loads the model's v5e-8 preset for sequences of `length`, with settings `table__key=value`.

    LoRA of rank 32 on all matrices, fixed sizes, and full rematerialization unless `plan__remat`
    is given.
    """
    from configs.load import load_config

    changes = {
        "lora__rank": 32,
        "lora__alpha": 64.0,
        "plan__fixed": "true",
        "plan__remat": "full",
        "plan__row_tokens": length,
        "rollout__max_prompt_tokens": PROMPT,
        "rollout__max_new_tokens": length - PROMPT,
    } | settings
    overrides = [(key.replace("__", "."), str(value)) for key, value in changes.items()]
    return load_config(preset(model), overrides)


def preset_sequences(model: str, *, length: int) -> int:
    """Returns the sequences of `length` in a micro-batch of the preset, on each chip."""
    from configs.load import load_config

    config = load_config(preset(model), [])
    return config.micro_batch_rows * config.row_tokens // (config.plan.learner_devices * length)
