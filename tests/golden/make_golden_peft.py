"""Makes the golden adapters: random LoRA by PEFT on the golden models, and what comes out.

Needs PyTorch, transformers and PEFT, which the project does not depend on. From the repository's
root, after make_golden.py:

    /tmp/golden/bin/pip install peft==0.21.2
    /tmp/golden/bin/python tests/golden/make_golden_peft.py

Each folder then holds adapter_config.json and adapter_model.safetensors as PEFT writes them, and
golden.npz: `tokens` of the model's own golden file and their `logits` under the adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

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


def main() -> None:
    """Writes a folder for each adapter."""
    here = Path(__file__).parent
    for seed, (name, shape) in enumerate(ADAPTERS.items()):
        folder = here / shape["model"]
        settings = {key: value for key, value in shape.items() if key != "model"}
        kind = AutoModelForImageTextToText if "vision" in shape["model"] else AutoModelForCausalLM
        # Others leave out Gemma 2's soft cap of the scores.
        base = kind.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, parameter in sorted(model.named_parameters()):
                if "lora_" in key:
                    random = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(0.1 * random)
            tokens = np.load(folder / "golden.npz")["tokens"]
            logits = model(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
        # What it is called here, not where it lay when this was run.
        model.peft_config["default"].base_model_name_or_path = shape["model"]
        model.save_pretrained(here / name, save_embedding_layers=False)
        (here / name / "README.md").unlink(missing_ok=True)
        np.savez_compressed(here / name / "golden.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    main()
