"""A small valid configuration, and a function that writes variants of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import Config

SMALL = """
run = { name = "small" }
model = { path = "tiny", dtype = "float32" }

[data]
train = { path = "train.jsonl" }
validation = 0
test = { path = "openai/gsm8k", split = "test" }

[rewards]
functions = [
    { name = "correct", function = "rewards.correctness:exact_answer" },
    { name = "format", function = "rewards.format:well_formed", weight = 0.1 },
]

[rollout]
prompts_per_step = 4
max_prompt_tokens = 16
max_new_tokens = 32

[plan]
platform = "cpu"
placement = "split"
slots = 32
row_tokens = 48
micro_batch_tokens = 384

[budget]
steps = 10
"""

Write = Callable[..., Path]


def overrides(settings: str) -> list[tuple[str, str]]:
    """Overrides as `key=value; key=value`; a key with a leading dot is in the last one's table."""
    pairs, table = [], ""
    for setting in settings.split("; ") if settings else ():
        key, _, text = setting.partition("=")
        table = key.rpartition(".")[0] or table
        pairs.append((f"{table}.{key.rpartition('.')[2]}", text))
    return pairs


def load(path: Path, settings: str = "") -> Config:
    return load_config(path, overrides(settings))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes `text` to a file and returns its path; relative paths start in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEMMA_GRPO_HOME", raising=False)

    def write(text: str = SMALL) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def small(write: Write) -> Path:
    """The path of the small configuration."""
    return write()
