"""Small configurations, prompts, splits and completions for tests. No Ray, no JAX."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.data.demonstrations import LoadedDemonstrations
from pipeline.data.splits import LoadedData, LoadedSplit
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.types import Completion, Demonstration, Prompt, RolloutRequest, Segment

EOS = 1
PROMPTS = 20
"""Number of prompts in a split, for samplers with a skill."""
FRESH = hashlib.sha256(b"fresh").hexdigest()
PROBE = hashlib.sha256(b"probe").hexdigest()
_CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": "run", "seed": 3},
    "model": {"path": "nowhere", "dtype": "float32"},
    "data": {
        "train": {"path": "train.jsonl"},
        "validation": None,
        "test": {"path": "test.jsonl"},
    },
    "rewards": {
        "functions": [
            {"name": "correct", "function": "rewards.correctness:exact_answer", "weight": 1.0},
            {"name": "format", "function": "rewards.format:well_formed", "weight": 0.1},
        ]
    },
    "rollout": {
        "group_size": 2,
        "prompts_per_step": 2,
        "max_prompt_tokens": 8,
        "max_new_tokens": 80,
    },
    "plan": {
        "platform": "cpu",
        "placement": "split",
        "slots": 2,
    },
    "budget": {"steps": 3},
    "checkpoint": {"every_steps": 2, "every_s": 1e6},
    "wandb": {"mode": "disabled"},
}


def make_config(folder: Path, **tables: Mapping[str, Any]) -> Config:
    """A small configuration; keys of `tables` replace those of its tables."""
    given = {name: {**_CONFIG.get(name, {}), **table} for name, table in tables.items()}
    run = {**_CONFIG["run"], "dir": str(folder), **tables.get("run", {})}
    whole: dict[str, Any] = {**_CONFIG, **given, "run": run}
    rollout = whole["rollout"]
    longest = rollout["max_prompt_tokens"] + rollout["max_new_tokens"]
    rows = {"row_tokens": longest, "micro_batch_tokens": 2 * longest}
    return Config.model_validate(whole | {"plan": {**rows, **whole["plan"]}})


def make_prompts(count: int) -> tuple[Prompt, ...]:
    """Prompts whose answer is twice their id."""
    return tuple(
        Prompt(n, f"twice {n}?", np.array([2, 50 + n], np.int32), str(2 * n), {})
        for n in range(1, count + 1)
    )


def make_data(
    *, train: int = 5, validation: int = 0, test: int = 4, sets: Sequence[str] = (), sft: int = 0
) -> LoadedData:
    """Splits by number of prompts; 0: no such split. Evaluation sets equal the test split."""

    def split(count: int) -> LoadedSplit:
        return LoadedSplit(make_prompts(count), malformed=(), too_long=(), duplicates=0)

    examples = tuple(
        Demonstration(n, np.array([2, 50 + n], np.int32), np.array([60 + n, EOS], np.int32))
        for n in range(1, sft + 1)
    )
    return LoadedData(
        train=split(train),
        validation=split(validation) if validation else None,
        test=split(test),
        sets={name: split(test) for name in sets},
        sft=LoadedDemonstrations(examples, (), (), duplicates=0, overlaps=0) if sft else None,
    )


class CharTokenizer(Tokenizer):
    """One token for each character: its code point."""

    def __init__(self) -> None:
        self.pad_id, self.eos_id, self.bos_id = 0, EOS, 2
        self.vocab_size = sys.maxunicode + 1

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(character) for character in text], np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(int(token)) for token in tokens if token != EOS)

    def find(self, piece: str) -> int | None:
        return ord(piece) if len(piece) == 1 else None

    def piece(self, id_: int) -> str:
        return chr(id_)


def logprobs(tokens: np.ndarray, adapter: str) -> np.ndarray:
    """Log-probs of tokens under an adapter: float32 `seq`."""
    return -((tokens % 7 + int(adapter[:6], 16) / 2**20) / 10).astype(np.float32)


def completion(
    request: RolloutRequest, text: str = "", *, ended: bool = True, **changes: Any
) -> Completion:
    """A completion with the given text, sampled by version 0.

    Args:
        request: its request.
        text: without the stop token.
        ended: whether it ends with the stop token.
        changes: of the segment, and `stop_reason`.
    """
    tokens = np.array([ord(character) for character in text] + [EOS] * ended, np.int32)
    segment = Segment(tokens, logprobs(tokens, FRESH), version=0, adapter_sha256=FRESH)
    reason = changes.pop("stop_reason", "eos" if ended else "length")
    whole = Completion(request.name, request.prompt_tokens, (segment,), reason)
    return changed(whole, **changes)


def changed(one: Completion, **changes: Any) -> Completion:
    """The completion with changes of its last segment."""
    *earlier, last = one.segments
    return replace(one, segments=(*earlier, replace(last, **changes)))
