"""Text to token ids and back: SentencePiece as Gemma uses it.

Adds no <bos> and knows no turns (see chat.py); one text has one encoding, whoever asks.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor

# Pieces that Gemma's models list as plain text but that are no text; <pad>, <eos>, <bos> and <unk>
# are marked as such in the model itself.
_MARKERS = ("<mask>", "<start_of_turn>", "<end_of_turn>")


class Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Attributes:
        path: the model file.
        vocab_size: number of pieces.
        pad_id, eos_id, bos_id: ids of `<pad>`, `<eos>` and `<bos>`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read `tokenizer.model` from `folder`.

        Raises:
            FileNotFoundError: if it is not there.
            ValueError: if it cannot be read, or is not of Gemma's kind.
        """
        self.path = Path(folder) / "tokenizer.model"
        if not self.path.is_file():
            raise FileNotFoundError(f"no tokenizer at {self.path}; model.path needs one")
        self._processor = _read(self.path)
        self.vocab_size: int = self._processor.vocab_size()
        self.pad_id = self.piece_id("<pad>")
        self.eos_id = self.piece_id("<eos>")
        self.bos_id = self.piece_id("<bos>")
        self._silent = frozenset(self._silent_ids())

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `seq`; turn tokens in it become one id each."""
        return np.asarray(self._processor.encode(text), dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The exact text of `tokens`, leading spaces included, without special tokens."""
        ids = (int(token) for token in tokens)
        text: str = self._processor.decode([id_ for id_ in ids if id_ not in self._silent])
        return text

    def piece_id(self, piece: str) -> int:
        """Id of a piece such as `<end_of_turn>`.

        Raises:
            ValueError: if there is no such piece; names the nearest special one.
        """
        if (id_ := self._find(piece)) is not None:
            return id_
        nearest = difflib.get_close_matches(piece, self._special_pieces(), n=1, cutoff=0.0)
        raise ValueError(f"{self.path} has no piece {piece!r}; nearest: {nearest[0]!r}")

    def _find(self, piece: str) -> int | None:
        id_: int = self._processor.piece_to_id(piece)
        return id_ if self._processor.id_to_piece(id_) == piece else None

    def _silent_ids(self) -> list[int]:
        processor = self._processor
        ids = range(self.vocab_size)
        silent = [id_ for id_ in ids if processor.is_control(id_) or processor.is_unknown(id_)]
        return silent + [id_ for marker in _MARKERS if (id_ := self._find(marker)) is not None]

    def _special_pieces(self) -> list[str]:
        pieces = (self._processor.id_to_piece(id_) for id_ in range(self.vocab_size))
        return [piece for piece in pieces if piece.startswith("<") and piece.endswith(">")]


def _read(path: Path) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(path.read_bytes())
    except RuntimeError as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    probe = " a  b "
    if processor.decode(processor.encode(probe)) != probe:
        raise ValueError(
            f"{path} changes spaces: {probe!r} comes back as "
            f"{processor.decode(processor.encode(probe))!r}; Gemma's tokenizers keep text as it is"
        )
    return processor
