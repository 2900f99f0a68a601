"""Text to token ids and back: what a tokenizer is here, and how a model's is found.

Adds no <bos> and knows no turns (see chat.py); one text has one encoding, whoever asks.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.inputs.text.chat import ChatTemplate

MARKERS = ("<mask>", "<start_of_turn>", "<end_of_turn>")
"""Pieces that some of Gemma's tokenizers list as plain text but that are no text."""

MOST_PIECES = 2**24


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
