"""Makes the golden files: small random Gemmas and adapters, and what comes out of them.

Needs PyTorch, transformers and PEFT, which the project does not depend on. From the repository's
root:

    python3.11 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.12.1 peft==0.21.2
    /tmp/golden/bin/python tests/golden/make_golden.py

Each folder beside this file then holds config.json and model.safetensors as transformers writes
them, and golden.npz: `tokens` (`batch seq`), their `logits` (`batch seq vocab`), and for prompt n
`prompt_n` and `greedy_n`, its greedy continuation. The folder of an adapter holds
adapter_config.json and adapter_model.safetensors as PEFT writes them, and golden.npz: `tokens` of
the model's own file and their `logits` under the adapter. Two runs write the same values.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

ROWS, TOKENS, NEW = 2, 40, 24
PROMPTS = (3, 12, 19)
# A different summation order must not be able to change a greedy choice, or the logits much.
LEAST_MARGIN = 1e-3
MOST_ROUNDING = 3e-5

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
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": SHAPE["vocab_size"],
    "final_logit_softcapping": 5.0,
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
    # As E2B: a pattern of five, and a wider feed-forward in layers that share keys and values.
    "gemma4": {
        **GEMMA4,
        "num_hidden_layers": 10,
        "layer_types": 2 * [*4 * [LOCAL], GLOBAL],
        "num_kv_shared_layers": 5,
        "num_key_value_heads": 1,
        "use_double_wide_mlp": True,
    },
    # As E4B: a pattern of six.
    "gemma4_multimodal": {
        **GEMMA4,
        "num_hidden_layers": 12,
        "layer_types": 2 * [*5 * [LOCAL], GLOBAL],
        "num_kv_shared_layers": 6,
        "num_key_value_heads": 2,
    },
}
# Such that all continuations are as `greedy` asserts.
SEEDS = {
    "gemma3": 0,
    "gemma3_scaled": 1,
    "gemma2": 2,
    "gemma3_vision": 2,
    "gemma4": 0,
    "gemma4_multimodal": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


AUDIO: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 8,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "peft_gemma3": {"model": "gemma3", "r": 3, "lora_alpha": 6, "target_modules": ALL},
    # PEFT's usual choice for many models: keys are not adapted, though values are.
    "peft_gemma2": {
        "model": "gemma2",
        "r": 2,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
    },
    "peft_gemma3_vision": {
        "model": "gemma3_vision",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": r".*language_model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj",
    },
    "peft_gemma4_multimodal": {
        "model": "gemma4_multimodal",
        "r": 2,
        "lora_alpha": 6,
        "target_modules": r".*language_model\.layers\.\d+\."
        r"((self_attn|mlp)\.\w+_proj|per_layer_input_gate|per_layer_projection)",
    },
}


def empty_model(name: str) -> PreTrainedModel:
    """A model of the kind that the name says, in float32."""
    shape = SHAPE | MODELS[name]
    if name == "gemma2":
        # The only attention of transformers that caps scores.
        return Gemma2ForCausalLM(
            Gemma2Config(**shape, dtype="float32", attn_implementation="eager")
        )
    if name.startswith("gemma4"):
        return empty_gemma4(shape, multimodal=name == "gemma4_multimodal")
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


def empty_gemma4(shape: dict[str, Any], *, multimodal: bool) -> PreTrainedModel:
    """A Gemma 4 in float32, with towers for images and sound if it is multimodal."""
    text = Gemma4TextConfig(**shape, dtype="float32")
    if not multimodal:
        return Gemma4ForCausalLM(text)
    sizes = VISION | {"num_key_value_heads": 2, "head_dim": 4, "position_embedding_size": 4}
    config = Gemma4Config(
        text_config=text,
        vision_config=Gemma4VisionConfig(**sizes, use_clipped_linears=True),
        audio_config=Gemma4AudioConfig(**AUDIO),
        dtype="float32",
    )
    return Gemma4ForConditionalGeneration(config)


def randomize(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Fills a model so that no parameter, norms included, is the identity."""
    model = model.eval()
    text = getattr(model.model, "language_model", model.model)
    # Gemma 4 multiplies by the weight of a norm, the others by one plus the weight.
    identity = float(text.config.model_type == "gemma4_text")
    scalars = {name: x for name, x in model.named_buffers() if name.endswith("layer_scalar")}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted({**dict(model.named_parameters()), **scalars}.items()):
            random = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(identity + 0.3 * random)
            else:
                parameter.copy_(parameter.shape[1] ** -0.5 * random)
        # A tied embedding this large would make every token its own successor.
        text.embed_tokens.weight.mul_(0.2 if len(text.layers) > 4 else 0.1)
        text.norm.weight.add_(5.0)
        if identity:
            # What would amplify rounding errors: large scores, which Gemma 4 does not scale, and
            # GELU of very negative numbers, whose result is normalized.
            for layer in text.layers:
                layer.self_attn.q_norm.weight.mul_(layer.self_attn.head_dim**-0.5)
                layer.per_layer_input_gate.weight.mul_(0.2)
    return model


def greedy(model: PreTrainedModel, prompt: np.ndarray) -> np.ndarray:
    """The continuation by `generate`, with its cache; no token ends it.

    It must not repeat itself much, and another summation order must not change a choice.
    """
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
    continuation = found.sequences[0, len(prompt) :].numpy().astype(np.int32)
    assert len(continuation) == NEW
    assert len(set(continuation.tolist())) > NEW // 3
    assert float((best - second).min()) > LEAST_MARGIN
    return continuation


def write(folder: Path, model: PreTrainedModel, *, seed: int) -> None:
    """Writes the model, its logits of random tokens and its continuations of random prompts."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, SHAPE["vocab_size"], (ROWS, TOKENS))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
        exact = copy.deepcopy(model).double()(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(logits - exact).max() <= MOST_ROUNDING
    arrays = {"tokens": tokens.astype(np.int32), "logits": logits}
    for number, length in enumerate(PROMPTS):
        prompt = rng.integers(3, SHAPE["vocab_size"], length)
        arrays[f"prompt_{number}"] = prompt.astype(np.int32)
        arrays[f"greedy_{number}"] = greedy(model, prompt)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "golden.npz", **arrays)


def write_adapter(folder: Path, shape: dict[str, Any], *, seed: int) -> None:
    """Writes a random LoRA on the model that the shape names, and the logits under it."""
    base = folder.parent / shape["model"]
    settings = {key: value for key, value in shape.items() if key != "model"}
    kind = AutoModelForImageTextToText if "vision" in shape["model"] else AutoModelForCausalLM
    # Others leave out Gemma 2's soft cap of the scores.
    plain = kind.from_pretrained(base, dtype="float32", attn_implementation="eager").eval()
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            if "lora_" in key:
                random = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * random)
        tokens = np.load(base / "golden.npz")["tokens"]
        logits = model(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
    # What it is called here, not where it lay when this was run.
    model.peft_config["default"].base_model_name_or_path = shape["model"]
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    np.savez_compressed(folder / "golden.npz", tokens=tokens, logits=logits)


def main() -> None:
    """Writes a folder for each model and each adapter."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Make the golden files.")
    names = [*SEEDS, *ADAPTERS]
    parser.add_argument("names", nargs="*", default=names, help="folders (default: all)")
    for name in parser.parse_args().names:
        if name in ADAPTERS:
            write_adapter(here / name, ADAPTERS[name], seed=list(ADAPTERS).index(name))
        else:
            write(here / name, randomize(empty_model(name), seed=SEEDS[name]), seed=SEEDS[name])


if __name__ == "__main__":
    main()
