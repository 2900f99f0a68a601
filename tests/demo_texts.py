"""A tokenizer trained on the demo's texts, for tests."""

from __future__ import annotations

from pathlib import Path
from random import Random

from sentencepiece.sentencepiece_model_pb2 import ModelProto

from launch.demo.task import make_problem, solution
from launch.demo.tokenizer import train_tokenizer
from pipeline.data.text.exported import write_unigram_json

GEMMA4_PIECES = {
    50: "<|tool_response>",
    98: "<|think|>",
    100: "<|channel>",
    101: "<channel|>",
    105: "<|turn>",
    106: "<turn|>",
}
"""Pieces of Gemma 4 in place of Gemma 3's, by id."""
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def demo_texts(count: int = 300) -> list[str]:
    """Questions and solutions of the demo's task."""
    rng = Random(0)
    problems = [make_problem(rng) for _ in range(count)]
    return [f"user\n{p.question}" for p in problems] + [solution(p, rng) for p in problems]


def write_tokenizer(folder: Path, *, gemma4: bool = False) -> Path:
    """Writes `tokenizer.model`, of Gemma 3 or 4, into `folder` and returns the folder."""
    file = folder / "tokenizer.model"
    train_tokenizer(demo_texts(), file, vocab_size=480, whole=TAGS)
    if gemma4:
        model = ModelProto.FromString(file.read_bytes())
        for id_, piece in GEMMA4_PIECES.items():
            model.pieces[id_].piece = piece
        file.write_bytes(model.SerializeToString(deterministic=True))
    return folder


def write_tokenizer_json(folder: Path, *, of: Path) -> Path:
    """Converts the SentencePiece model in folder `of` to a `tokenizer.json` like Gemma's."""
    write_unigram_json(folder, model=of / "tokenizer.model")
    return folder
