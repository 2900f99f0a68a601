"""A tokenizer trained on the demo's texts, for tests."""

from __future__ import annotations

from pathlib import Path
from random import Random

import tokenizers
from sentencepiece import SentencePieceProcessor
from tokenizers import decoders, models, normalizers

from launch.demo.task import make_problem, solution
from launch.demo.tokenizer import GEMMA4_PIECES, train_tokenizer
from pipeline.data.text.tokenizer import CHANNEL, MARKERS

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
    pieces = SentencePieceProcessor(str(of / "tokenizer.model"))
    size = pieces.vocab_size()
    scores = [(pieces.id_to_piece(id_), pieces.get_score(id_)) for id_ in range(size)]
    whole = tokenizers.Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=True))
    whole.normalizer = normalizers.Replace(" ", "\u2581")
    whole.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    known = {piece for piece, _ in scores}
    special = [*("<pad>", "<eos>", "<bos>", "<unk>"), *known.intersection((*MARKERS, *CHANNEL))]
    whole.add_special_tokens(
        [tokenizers.AddedToken(piece, normalized=False, special=True) for piece in special]
    )
    # SentencePiece's user-defined pieces: the non-special ids up to 111.
    symbols = [piece for piece, _ in scores[4:112] if piece not in special]
    fill = [piece for piece, _ in scores[112:] if piece.startswith("<unused")]
    whole.add_tokens(
        [tokenizers.AddedToken(piece, normalized=False) for piece in (*symbols, *fill)]
    )
    whole.save(str(folder / "tokenizer.json"))
    return folder
