"""The peer of `launch.bench.torch`: a plain loop of PyTorch and transformers, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from launch.bench.harness import Figures, medians
from pipeline.plan.topology import GIB

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class LoraLinear(torch.nn.Module):
    """A frozen linear layer and a float32 LoRA, scaled by 1."""

    def __init__(self, frozen: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        made: dict[str, Any] = {"device": frozen.weight.device, "dtype": torch.float32}
        self.a = torch.nn.Parameter(torch.randn(rank, frozen.in_features, **made))
        self.b = torch.nn.Parameter(torch.zeros(frozen.out_features, rank, **made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result with the LoRA's added."""
        return self.frozen(x) + x @ self.a.to(x.dtype).T @ self.b.to(x.dtype).T


def make_model(*, folder: str, settings: Mapping[str, Any]) -> Figures:
    """Writes a Gemma 3 with random weights."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**settings)
    with torch.device(DEVICE):
        model = transformers.Gemma3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return {}


def decode(*, folder: str, sizes: Mapping[str, int]) -> Figures:
    """Seconds and memory, and the mean log-prob of the completions in the folder."""
    prompt, new = sizes["prompt"], sizes["new"]
    model, tokens = _open(folder).eval(), np.load(Path(folder) / "decoded.npy")
    given = torch.from_numpy(tokens).long().to(DEVICE)
    prompts = given[:, :prompt]

    def run() -> None:
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
        )
        assert made.shape == given.shape

    with torch.no_grad():
        found = _timed(run)
        scored = [_logprobs(model, row[None], new).mean().item() for row in given]
    return {**found, "logprob": sum(scored) / len(scored)}


def gradient(*, folder: str, sizes: Mapping[str, int]) -> Figures:
    """Seconds and memory of the gradient of GRPO's loss at ratio 1, a mean over all tokens."""
    rows, prompt, new, micro = (sizes[key] for key in ("rows", "prompt", "new", "micro"))
    model = _open(folder).train().requires_grad_(requires_grad=False)
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, LoraLinear(child, sizes["rank"]))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(8, model.config.vocab_size, (rows, prompt + new), device=DEVICE)
    advantages = torch.randn(rows, 1, device=DEVICE)

    def run() -> None:
        model.zero_grad()
        for some, advantage in zip(tokens.split(micro), advantages.split(micro), strict=True):
            logprobs = _logprobs(model, some, new)
            ratio = torch.exp(logprobs - logprobs.detach())
            loss = -(ratio * advantage).sum() / (rows * new)
            loss.backward()

    return _timed(run)


def _open(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").to(DEVICE)


def _logprobs(model: Any, tokens: torch.Tensor, new: int) -> torch.Tensor:
    """Log-probs of the last `new` tokens of each row, `rows new`, from whole logits."""
    kept = model(input_ids=tokens, logits_to_keep=new + 1, use_cache=False)
    logits = kept.logits[:, :-1].float()
    taken = logits.gather(-1, tokens[:, -new:, None])[..., 0]
    return taken - logits.logsumexp(-1)


def _timed(run: Callable[[], None]) -> dict[str, Any]:
    def waited() -> None:
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    waited()
    seconds = medians({"run": waited}, repeats=3)["run"]
    gib = torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else None
    return {"seconds": seconds, "gib": gib}
