"""Text to token ids and back: what a tokenizer is here, and how a model's is found.

Adds no <bos> and knows no turns (see chat.py); one text has one encoding, whoever asks.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.schema import Model
from pipeline.inputs.hub.model_source import find_model, find_tokenizer
from pipeline.inputs.text.chat import ChatTemplate, read_chat_template

SENTENCEPIECE, JSON = "tokenizer.model", "tokenizer.json"
MARKERS = ("<mask>", "<start_of_turn>", "<end_of_turn>")
"""Pieces that some of Gemma's tokenizers list as plain text but that are no text."""

MOST_PIECES = 2**24
_MOST_BYTES = 2**29


class Tokenizer(ABC):
    """The tokenizer of a model.

    Attributes:
        path: the file it was read from.
        vocab_size: number of pieces; ids are below it.
        pad_id, eos_id, bos_id: ids of `<pad>`, `<eos>` and `<bos>`.
        chat_template: the model's own turns; None: it has none.
    """

    path: Path
    vocab_size: int
    pad_id: int
    eos_id: int
    bos_id: int
    chat_template: ChatTemplate | None = None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `seq`; turn tokens in it become one id each."""

    @abstractmethod
    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The exact text of `tokens`, leading spaces included, without special tokens.

        Bytes that make no whole character become U+FFFD each.
        """

    @abstractmethod
    def find(self, piece: str) -> int | None:
        """Id of a piece such as `<end_of_turn>`, if there is one."""

    @abstractmethod
    def piece(self, id_: int) -> str:
        """The piece with an id below `vocab_size`."""

    def piece_id(self, piece: str) -> int:
        """Id of a piece such as `<end_of_turn>`.

        Raises:
            ValueError: if there is no such piece; names the nearest special one.
        """
        if (id_ := self.find(piece)) is not None:
            return id_
        pieces = (self.piece(id_) for id_ in range(self.vocab_size))
        special = [name for name in pieces if name.startswith("<") and name.endswith(">")]
        nearest = difflib.get_close_matches(piece, special, n=1, cutoff=0.0)
        hint = f"nearest: {nearest[0]!r}" if nearest else "it has no special pieces"
        raise ValueError(f"{self.path} has no piece {piece!r}; {hint}")


def open_tokenizer(model: Model) -> Tokenizer:
    """The tokenizer of a model, with the chat template of the model's folder.

    Where the model's folder has no template, it is that of the tokenizer's folder, if any.

    Raises:
        FileNotFoundError: if model or tokenizer are not there.
        ValueError: if tokenizer or template cannot be read.
    """
    folder = find_model(model)
    where = _beside(folder) if model.tokenizer is None else find_tokenizer(model.tokenizer)
    tokenizer = read_tokenizer(where)
    template = read_chat_template(folder)
    if template is None:
        template = read_chat_template(tokenizer.path.parent)
    tokenizer.chat_template = template
    return tokenizer


def _beside(folder: Path) -> Path:
    """The folder, or the one above where only that has a tokenizer, as with flax checkpoints."""
    found = [
        path
        for path in (folder, folder.parent)
        if any((path / name).is_file() for name in (SENTENCEPIECE, JSON))
    ]
    return found[0] if found else folder


def read_tokenizer(where: Path) -> Tokenizer:
    """The tokenizer in a file or a folder; of two in a folder the SentencePiece model.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it cannot be read, or is not of Gemma's kind.
    """
    path = where
    if not where.is_file():
        found = [where / name for name in (SENTENCEPIECE, JSON) if (where / name).is_file()]
        if not found:
            raise FileNotFoundError(
                f"no tokenizer at {where}: neither {SENTENCEPIECE} nor {JSON} is there; "
                "model.tokenizer names one that stands elsewhere"
            )
        path = found[0]
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; no tokenizer has more than {_MOST_BYTES:,}")
    if path.suffix == ".json":
        from pipeline.inputs.text.tokenizer_json import JsonTokenizer

        return JsonTokenizer(path)
    from pipeline.inputs.text.sentencepieces import SentencePieceTokenizer

    return SentencePieceTokenizer(path)


def check_spaces(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that does not keep text as it is.

    Raises:
        ValueError: showing what becomes of spaces.
    """
    probe = " a  b "
    try:
        found = tokenizer.decode(tokenizer.encode(probe))
    except Exception as error:  # noqa: BLE001  # the libraries raise nothing narrower
        raise ValueError(f"{tokenizer.path} cannot encode {probe!r}: {error}") from None
    if found != probe:
        raise ValueError(
            f"{tokenizer.path} changes spaces: {probe!r} comes back as {found!r}; Gemma's "
            "tokenizers keep text as it is"
        )
