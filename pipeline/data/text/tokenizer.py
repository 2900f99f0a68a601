"""The tokenizer interface: text to token ids and back.

Tokenizers add no <bos> and no turns (see chat.py); equal texts have equal encodings.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.data.text.chat import GEMMA3, GEMMA4, ChatTemplate, Turns

MARKERS = ("<mask>", GEMMA3.start, GEMMA3.end, GEMMA4.start, GEMMA4.end, "<|think|>")
"""Special pieces that some Gemma tokenizers declare as plain text."""
CHANNEL = ("<|channel>", "<channel|>")
"""Special pieces around the thoughts of Gemma 4. The text of a completion contains them, because
they separate its reasoning from its answer."""


class Tokenizer(ABC):
    """The tokenizer of a model.

    Attributes:
        path: the file of the tokenizer.
        vocab_size: number of pieces; ids are below it.
        pad_id, eos_id, bos_id: ids of `<pad>`, `<eos>` and `<bos>`.
        turns: the turns of the model.
        chat_template: the model's chat template; None if it has none.
        added_ids: ids of pieces that were added to a vocabulary; the model may have no row for
            them, as for the images of a text model.
        rows: rows of the model's embedding; None: unknown.
    """

    path: Path
    vocab_size: int
    pad_id: int
    eos_id: int
    bos_id: int
    turns: Turns = GEMMA3
    chat_template: ChatTemplate | None = None
    added_ids: frozenset[int] = frozenset()
    rows: int | None = None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `seq`; each turn token becomes one id."""

    @abstractmethod
    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The exact text of `tokens`, with leading spaces, without special tokens but `CHANNEL`.

        Each byte of an incomplete character becomes U+FFFD.
        """

    @abstractmethod
    def find(self, piece: str) -> int | None:
        """Id of a piece such as `<end_of_turn>`; None if there is none."""

    @abstractmethod
    def piece(self, id_: int) -> str:
        """The piece with an id below `vocab_size`."""

    def problem_of(self, tokens: np.ndarray) -> str | None:
        """The piece of `tokens` for which the model has no row, in words; None without one."""
        beyond = tokens[tokens >= (self.rows or self.vocab_size)].tolist()
        if not beyond:
            return None
        return f"contains {self.piece(beyond[0])}, for which the model's embedding has no row"

    def _finish(self) -> None:
        """Looks up the special pieces, at the end of construction; ValueError if one is missing."""
        self.turns = GEMMA3 if self.find(GEMMA4.start) is None else GEMMA4
        names = "<pad>", "<eos>", "<bos>"
        self.pad_id, self.eos_id, self.bos_id = map(self.piece_id, names)

    def piece_id(self, piece: str) -> int:
        """Id of a piece; `<start_of_turn>` and `<end_of_turn>` are the turn tokens of any model.

        Raises:
            ValueError: if there is no such piece, with the nearest special piece.
        """
        own = {GEMMA3.start: self.turns.start, GEMMA3.end: self.turns.end}
        if (id_ := self.find(own.get(piece, piece))) is not None:
            return id_
        pieces = (self.piece(id_) for id_ in range(self.vocab_size))
        special = [name for name in pieces if name.startswith("<") and name.endswith(">")]
        nearest = difflib.get_close_matches(piece, special, n=1, cutoff=0.0)
        hint = f"nearest: {nearest[0]!r}" if nearest else "it has no special pieces"
        raise ValueError(f"{self.path} has no piece {piece!r}; {hint}")
