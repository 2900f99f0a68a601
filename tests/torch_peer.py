"""Runs our exports with transformers and PEFT; the tests start it in an environment with PyTorch.

    python tests/torch_peer.py IN.npz OUT.npz FOLDER [BASE_FOLDER]

FOLDER is a model, or an adapter if BASE_FOLDER is given. IN has `tokens` (`batch seq`) and `prompt`
(`seq`). OUT gets `logits` (`batch seq vocab`), `greedy` (`seq`: prompt and continuation), and as
text `kind`, the model's class, and `complaints`, the problems that loading reported.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

NEW = 24
# Other implementations omit Gemma 2's soft cap of the scores.
EXACT = {"attn_implementation": "eager"}


def load(folder: Path, base: Path | None) -> tuple[Any, str]:
    """The model, and the problems that loading reported; empty if there are none."""
    if base is None:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", output_loading_info=True, **EXACT
        )
        return model, "; ".join(f"{key}: {sorted(found)}" for key, found in info.items() if found)
    import peft

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind = transformers.AutoModelForCausalLM
        if transformers.AutoConfig.from_pretrained(base).model_type == "gemma3":
            kind = transformers.AutoModelForImageTextToText
        whole = kind.from_pretrained(base, dtype="float32", **EXACT)
        model = peft.PeftModel.from_pretrained(whole, folder)
    return model, "; ".join(str(w.message) for w in caught if "adapter" in str(w.message))


def main() -> None:
    """Reads the input, runs the model, writes the output."""
    source, target, folder, *rest = map(Path, sys.argv[1:])
    given = np.load(source)
    model, complaints = load(folder, rest[0] if rest else None)
    model = model.eval()
    with torch.no_grad():
        tokens = torch.from_numpy(given["tokens"]).long()
        logits = model(input_ids=tokens).logits.float().numpy()
        prompt = torch.from_numpy(given["prompt"]).long()[None]
        greedy = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
        )[0].numpy()
    np.savez(
        target,
        logits=logits,
        greedy=greedy,
        kind=np.array(type(model).__name__),
        complaints=np.array(complaints),
    )


if __name__ == "__main__":
    main()
