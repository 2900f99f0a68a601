"""Makes the golden files: small random Gemmas, and what Hugging Face computes with them.

Needs PyTorch and transformers, which the project does not depend on. From the repository's root:

    python3.11 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.12.1
    /tmp/golden/bin/python tests/golden/make_golden.py

Each folder beside this file then holds config.json and model.safetensors as transformers writes
them, and golden.npz: `tokens` (`batch seq`), their `logits` (`batch seq vocab`), and for prompt n
`prompt_n` and `greedy_n`, its greedy continuation. Two runs write the same values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

ROWS, TOKENS, NEW = 2, 40, 24
PROMPTS = (3, 12, 19)
# A different summation order must not be able to change a greedy choice.
LEAST_MARGIN = 1e-3

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 32,
    "num_hidden_layers": 7,
    "sliding_window": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 12,
        # Not head_dim, as in Gemma 3 27B.
        "query_pre_attn_scalar": 9,
    },
    "gemma3_scaled": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    # Two rounds of its pattern; caps as small as to bite at the scores of a random model.
    "gemma2": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        # Not head_dim, as in Gemma 2 27B.
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_vision": {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
    },
}
# Such that no continuation of theirs repeats itself too much.
SEEDS = {"gemma3": 0, "gemma3_scaled": 1, "gemma2": 2, "gemma3_vision": 2}
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def empty_model(name: str) -> PreTrainedModel:
    """A model of the kind that the name says, in float32."""
    shape = SHAPE | MODELS[name]
    if name == "gemma2":
        # The only attention of transformers that caps scores.
        return Gemma2ForCausalLM(
            Gemma2Config(**shape, dtype="float32", attn_implementation="eager")
        )
    text = Gemma3TextConfig(**shape, dtype="float32")
    if name != "gemma3_vision":
        return Gemma3ForCausalLM(text)
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
        boi_token_index=1,
        eoi_token_index=2,
        image_token_index=0,
        dtype="float32",
    )
    return Gemma3ForConditionalGeneration(config)


def random_model(name: str, *, seed: int) -> PreTrainedModel:
    """A float32 model in which no parameter, norms included, is the identity."""
    model = empty_model(name).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
        # A tied embedding this large would make every token its own successor.
        text = getattr(model.model, "language_model", model.model)
        text.embed_tokens.weight.mul_(0.2 if len(text.layers) > 4 else 0.1)
        text.norm.weight.add_(5.0)
    return model


def greedy(model: PreTrainedModel, prompt: np.ndarray) -> np.ndarray:
    """The continuation by `generate`, with its cache; no token ends it."""
    found = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best, second = torch.stack(found.logits).topk(2).values.unbind(-1)
    margin = float((best - second).min())
    continuation = found.sequences[0, len(prompt) :].numpy().astype(np.int32)
    assert len(continuation) == NEW
    assert margin > LEAST_MARGIN, margin
    assert len(set(continuation.tolist())) > NEW // 3, continuation
    return continuation


def main() -> None:
    """Writes a folder for each model."""
    here = Path(__file__).parent
    for name, seed in SEEDS.items():
        model = random_model(name, seed=seed)
        model.save_pretrained(here / name)
        (here / name / "generation_config.json").unlink(missing_ok=True)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(3, SHAPE["vocab_size"], (ROWS, TOKENS))
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.numpy()
        arrays = {"tokens": tokens.astype(np.int32), "logits": logits}
        for number, length in enumerate(PROMPTS):
            prompt = rng.integers(3, SHAPE["vocab_size"], length)
            arrays[f"prompt_{number}"] = prompt.astype(np.int32)
            arrays[f"greedy_{number}"] = greedy(model, prompt)
        np.savez_compressed(here / name / "golden.npz", **arrays)


if __name__ == "__main__":
    main()
