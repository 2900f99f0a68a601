"""Gemma's own tokenizer files: SentencePiece models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor

from pipeline.inputs.text.tokenizer import MARKERS, Tokenizer, check_spaces


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model`; see `Tokenizer`."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ValueError: if it cannot be read, or is not of Gemma's kind.
        """
        self.path = path
        self._processor = SentencePieceProcessor()
        try:
            self._processor.load_from_serialized_proto(path.read_bytes())
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
        self.vocab_size = self._processor.vocab_size()
        self._silent = frozenset(self._silent_ids())
        check_spaces(self)
        self.pad_id = self.piece_id("<pad>")
        self.eos_id = self.piece_id("<eos>")
        self.bos_id = self.piece_id("<bos>")

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`."""
        return np.asarray(self._processor.encode(text), dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        ids = (int(token) for token in tokens)
        text: str = self._processor.decode([id_ for id_ in ids if id_ not in self._silent])
        return text

    def find(self, piece: str) -> int | None:
        """See `Tokenizer`."""
        id_: int = self._processor.piece_to_id(piece)
        return id_ if self._processor.id_to_piece(id_) == piece else None

    def piece(self, id_: int) -> str:
        """See `Tokenizer`."""
        return self._processor.id_to_piece(id_)

    def _silent_ids(self) -> list[int]:
        processor = self._processor
        ids = range(self.vocab_size)
        silent = [id_ for id_ in ids if processor.is_control(id_) or processor.is_unknown(id_)]
        return silent + [id_ for marker in MARKERS if (id_ := self.find(marker)) is not None]
