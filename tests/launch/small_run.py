"""A small valid request: configuration, data and a model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipeline.run.checkpoint_files import BEST, BEST_FILE

CONFIG = """
[run]
name = "small"
dir = "runs"

[model]
path = "model"
dtype = "float32"

[data]
train = { path = "train.jsonl" }
test = { path = "test.jsonl" }

[rewards]
functions = [{ name = "correct", function = "rewards.correctness:exact_answer" }]

[rollout]
group_size = 2
prompts_per_step = 3
max_prompt_tokens = 60
max_new_tokens = 8

[plan]
platform = "cpu"
placement = "split"
slots = 6
micro_batch_tokens = 136

[budget]
steps = 3

[wandb]
mode = "disabled"
"""


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Returns distinct rows of a dataset."""
    return [
        {"question": f"tom has {n} apples.", "answer": str(n)} for n in range(first, first + count)
    ]


def write_rows(path: Path, lines: Sequence[Any]) -> None:
    """Writes a JSONL file; strings are written unchanged."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def write_request(folder: Path, *, tokenizer: Path) -> Path:
    """Writes everything that a small run needs before devices; returns the configuration's path."""
    model = folder / "model"
    model.mkdir()
    shutil.copy(tokenizer / "tokenizer.model", model)
    config = {"model_type": "gemma3_text", "vocab_size": 480}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"model.norm.weight": np.zeros(2304, np.float32)}, model / "model.safetensors")
    write_rows(folder / "train.jsonl", rows(0, 6))
    write_rows(folder / "test.jsonl", rows(100, 4))
    path = folder / "small.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def write_checkpoint(run: Path, step: int, *, adapter: str = "a") -> None:
    """Writes what names a checkpoint of a run folder, without its arrays."""
    facts = run / "checkpoints" / str(step) / "facts" / "metadata"
    facts.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": step, "adapter_sha256": adapter, "meta": {}})
    facts.write_text(text, encoding="utf-8")


def write_best(run: Path, step: int) -> None:
    """Writes the best adapter by validation of a run folder."""
    file = run / "checkpoints" / BEST / BEST_FILE
    file.parent.mkdir(parents=True)
    values = {"a": np.zeros(1, np.float32)}
    save_file(values, file, metadata={"version": str(step), "sha256": "b"})


def everything_below(folder: Path) -> set[str]:
    """Returns the names of all files and folders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
