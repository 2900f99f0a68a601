"""A tokenizer trained on the demo's texts, for tests."""

from __future__ import annotations

from pathlib import Path
from random import Random

from launch.demo.task import make_problem, solution
from launch.demo.tokenizer import GEMMA4_PIECES, train_tokenizer
from pipeline.data.text.exported import write_unigram_json

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def demo_texts(count: int = 300) -> list[str]:
    """Questions and solutions of the demo's task."""
    rng = Random(0)
    problems = [make_problem(rng) for _ in range(count)]
    return [f"user\n{p.question}" for p in problems] + [solution(p, rng) for p in problems]


def write_tokenizer(folder: Path, *, gemma4: bool = False) -> Path:
    """Writes `tokenizer.model`, of Gemma 3 or 4, into `folder` and returns the folder."""
    train_tokenizer(
        demo_texts(),
        folder / "tokenizer.model",
        vocab_size=480,
        whole=TAGS,
        special=GEMMA4_PIECES if gemma4 else None,
    )
    return folder


def write_tokenizer_json(folder: Path, *, of: Path) -> Path:
    """Converts the SentencePiece model in folder `of` to a `tokenizer.json` like Gemma's."""
    write_unigram_json(folder, model=of / "tokenizer.model")
    return folder
