"""Builds a tiny Gemma's tokenizer: SentencePiece, with Gemma's special tokens at Gemma's ids.

Like Gemma's except for its size: spaces as U+2581, no dummy prefix, no normalization, single
digits, byte fallback. The model is written directly, because SentencePiece's own trainer prefers
word fragments on such a small language.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as proto

SPACE = "\u2581"
RESERVED_PIECES = ("<pad>", "<eos>", "<bos>", "<unk>")
# Gemma 3's ids 4 to 107.
SPECIAL_PIECES = (
    "<mask>",
    "[multimodal]",
    *(f"<unused{n}>" for n in range(99)),
    "<start_of_turn>",
    "<end_of_turn>",
    "\n",
)
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_WORD = re.compile(rf"{SPACE}?[^\W\d_]+")


def train_tokenizer(
    texts: Iterable[str],
    path: Path,
    *,
    vocab_size: int,
    whole: Sequence[str] = (),
) -> None:
    """Writes a unigram model of the characters and words of `texts`: same texts, same bytes.

    Every character becomes a piece, then the most frequent words until the vocabulary is full. A
    word with a leading space and one without are different pieces. Remaining ids are filled with
    `<unused99>` and so on, as in Gemma's own vocabulary.

    `whole` are strings that become one piece each, from id 108 on. `vocab_size` must be enough for
    special tokens, bytes and characters.
    """
    symbols = (*SPECIAL_PIECES, *whole)
    characters, words = _count(texts, symbols)
    fixed = len(RESERVED_PIECES) + len(symbols) + len(BYTE_PIECES) + len(characters)
    assert vocab_size >= fixed, (vocab_size, fixed)
    known = words.most_common(vocab_size - fixed)
    fill = (f"<unused{99 + n}>" for n in range(vocab_size - fixed - len(known)))
    model = _empty_model(vocab_size)
    for piece, score, kind in (
        *_pieces(RESERVED_PIECES[:3], "CONTROL"),
        *_pieces(RESERVED_PIECES[3:], "UNKNOWN"),
        *_pieces(symbols, "USER_DEFINED"),
        *_pieces(BYTE_PIECES, "BYTE"),
        *_scored(characters, known),
        *_pieces(fill, "USER_DEFINED"),
    ):
        kind_number = proto.ModelProto.SentencePiece.Type.Value(kind)
        model.pieces.add(piece=piece, score=score, type=kind_number)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _count(texts: Iterable[str], symbols: Sequence[str]) -> tuple[list[str], Counter[str]]:
    """Returns the sorted characters, and the counts of longer words, ties in sorted order."""
    boundary = re.compile("|".join(re.escape(symbol) for symbol in sorted(symbols, key=len)[::-1]))
    characters, words = {SPACE}, Counter[str]()
    for text in texts:
        for part in boundary.split(text.replace(" ", SPACE)):
            characters.update(part)
            words.update(word for word in _WORD.findall(part) if len(word) > 1)
    return sorted(characters), Counter({word: words[word] for word in sorted(words)})


def _pieces(pieces: Iterable[str], kind: str) -> Iterator[tuple[str, float, str]]:
    return ((piece, 0.0, kind) for piece in pieces)


def _scored(
    characters: Sequence[str], words: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, float, str]]:
    """Yields pieces with log-probabilities; a word is likelier than its spelling by characters."""
    total = sum(count for _, count in words)
    scores = [(word, math.log(count / total)) for word, count in words]
    character_score = min((score for _, score in scores), default=0.0) - 1.0
    for piece, score in (*((character, character_score) for character in characters), *scores):
        yield piece, score, "NORMAL"


def _empty_model(vocab_size: int) -> Any:
    pad, eos, bos, unk = RESERVED_PIECES
    trainer = proto.TrainerSpec(
        model_type=proto.TrainerSpec.UNIGRAM,
        vocab_size=vocab_size,
        byte_fallback=True,
        split_digits=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece=pad,
        eos_piece=eos,
        bos_piece=bos,
        unk_piece=unk,
    )
    normalizer = proto.NormalizerSpec(
        name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False
    )
    return proto.ModelProto(trainer_spec=trainer, normalizer_spec=normalizer)
