"""A small valid request: configuration, data and a model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipeline.data.models.hf_config import read_model_shape, tensor_shapes
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
validation = 0
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
micro_batch_tokens = 152

[budget]
steps = 3

[wandb]
mode = "disabled"
"""
MODEL = {
    "model_type": "gemma3_text",
    "vocab_size": 480,
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "sliding_window_pattern": 2,
}


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
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    shapes = dict(tensor_shapes(read_model_shape(MODEL)))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(zeros, model / "model.safetensors")
    write_rows(folder / "train.jsonl", rows(0, 6))
    write_rows(folder / "test.jsonl", rows(100, 4))
    path = folder / "small.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def write_checkpoint(run: Path, step: int) -> None:
    """Writes what names a checkpoint of a run folder, without its arrays."""
    facts = run / "checkpoints" / str(step) / "facts" / "metadata"
    facts.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": step, "adapter_sha256": "a", "meta": {}})
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
