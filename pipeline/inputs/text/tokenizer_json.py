"""Hugging Face's tokenizer files, read by its `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import tokenizers

from pipeline.inputs.text.tokenizer import MARKERS, MOST_PIECES, Tokenizer, check_spaces

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`; see `Tokenizer`."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ValueError: if it cannot be read, or is not of Gemma's kind.
        """
        self.path = path
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer of Hugging Face's: {error}") from None
        # Settings of the file that would change texts by themselves.
        self._inner.no_truncation()
        self._inner.no_padding()
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MOST_PIECES:
            raise ValueError(
                f"{path} has an id of {self.vocab_size - 1}; the most is {MOST_PIECES}"
            )
        self._bytes = {
            id_: int(match[1], 16)
            for piece, id_ in vocabulary.items()
            if (match := _BYTE.fullmatch(piece))
        }
        added = self._inner.get_added_tokens_decoder()
        names = (*MARKERS, "<unk>", *(token.content for token in added.values() if token.special))
        self._silent = frozenset(vocabulary[name] for name in names if name in vocabulary)
        check_spaces(self)
        self.pad_id = self.piece_id("<pad>")
        self.eos_id = self.piece_id("<eos>")
        self.bos_id = self.piece_id("<bos>")

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer`; other special tokens in the text become one id each, too."""
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        ids = [id_ for id_ in map(int, tokens) if id_ not in self._silent]
        parts = []
        # The library takes bytes together with whatever is broken among them.
        for is_bytes, run in groupby(ids, key=self._bytes.__contains__):
            if is_bytes:
                parts.append(_utf8(bytes(self._bytes[id_] for id_ in run)))
            else:
                parts.append(self._inner.decode(list(run), skip_special_tokens=False))
        return "".join(parts)

    def find(self, piece: str) -> int | None:
        """See `Tokenizer`."""
        return self._inner.token_to_id(piece)

    def piece(self, id_: int) -> str:
        """See `Tokenizer`; empty for a hole in the vocabulary."""
        return self._inner.id_to_token(id_) or ""


def _utf8(data: bytes) -> str:
    """Text of UTF-8; each byte that belongs to no whole character is a U+FFFD."""
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", errors="surrogateescape"))
