"""A tokenizer of the demo's words, for tests that need one."""

from __future__ import annotations

from pathlib import Path
from random import Random

from launch.demo.task import make_problem, solution
from launch.demo.tokenizer import train_tokenizer

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def demo_texts(count: int = 300) -> list[str]:
    """Questions and solutions of the demo's task."""
    rng = Random(0)
    problems = [make_problem(rng) for _ in range(count)]
    return [f"user\n{p.question}" for p in problems] + [solution(p, rng) for p in problems]


def write_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.model` into `folder` and return the folder."""
    train_tokenizer(demo_texts(), folder / "tokenizer.model", vocab_size=480, whole=TAGS)
    return folder
