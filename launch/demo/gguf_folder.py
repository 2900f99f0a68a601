"""Converts Gemma 3 270m in llama.cpp's GGUF format into a Hugging Face folder.

Needs the package `gguf`, which dequantizes the weights. The tokenizer is not read from the GGUF
file: there all special pieces are control pieces, so that turns would not be found in texts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pipeline.data.models.hf_config import read_model_shape, tensor_shapes
from pipeline.data.models.tensor_files import TensorSpec, plan_shards, write_shards

_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names of the modules of a layer, and those of GGUF."""

# Not in the file.
_FIXED: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "dtype": "bfloat16",
}
_SHARD_BYTES = 5 * 10**9


def convert(source: Path, *, tokenizer: Path, out: Path) -> None:
    """Writes the model in bfloat16, with its `config.json` and the tokenizer, into a folder.

    Args:
        source: the GGUF file of `gemma_files.txt`.
        tokenizer: its `tokenizer.model`.
        out: the folder.
    """
    from gguf import GGUFReader, dequantize  # late: an optional package

    reader = GGUFReader(source)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader)
    specs = [
        TensorSpec(name, shape, "bfloat16")
        for name, shape in tensor_shapes(read_model_shape(config))
    ]

    def value(spec: TensorSpec) -> np.ndarray:
        tensor = stored[_gguf_name(spec.name)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # llama.cpp stores 1 + weight of a norm.
        values = values - 1 if len(spec.shape) == 1 else values
        return values.reshape(spec.shape).astype(ml_dtypes.bfloat16)

    out.mkdir(parents=True, exist_ok=True)
    write_shards(out, plan_shards(specs, shard_bytes=_SHARD_BYTES), map(value, specs))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(tokenizer, out / "tokenizer.model")


def _config(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[f"gemma3.{name}"].contents()

    return _FIXED | {
        "vocab_size": int(
            next(t for t in reader.tensors if t.name == "token_embd.weight").shape[1]
        ),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("attention.key_length"),
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
        "query_pre_attn_scalar": field("attention.key_length"),
        "sliding_window": field("attention.sliding_window"),
        "max_position_embeddings": field("context_length"),
        "rope_theta": field("rope.freq_base"),
    }


def _gguf_name(name: str) -> str:
    """GGUF's name of a tensor of `hf_config.tensor_shapes`."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    layer, module = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_MODULES[module]}.weight"
