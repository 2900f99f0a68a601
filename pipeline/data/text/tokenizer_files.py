"""Reads a model's tokenizer: a SentencePiece `tokenizer.model` or a `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np
import tokenizers
from sentencepiece import SentencePieceProcessor

from configs.schema import Model
from pipeline.data.models.hf_folder import read_text_config
from pipeline.data.models.model_source import find_model, find_tokenizer
from pipeline.data.text.chat import read_chat_template
from pipeline.data.text.tokenizer import CHANNEL, MARKERS, Tokenizer

SENTENCEPIECE, JSON = "tokenizer.model", "tokenizer.json"


def open_tokenizer(model: Model) -> Tokenizer:
    """Opens the tokenizer of a model, with the chat template of the model's folder.

    If the model's folder has no template, the template of the tokenizer's folder is used, if any.
    The rows of the embedding are those of `config.json`, if it can be read.

    Raises:
        FileNotFoundError: if there is no model or no tokenizer.
        ValueError: if tokenizer or template cannot be read.
    """
    folder = find_model(model)
    where = _beside(folder) if model.tokenizer is None else find_tokenizer(model.tokenizer)
    tokenizer = read_tokenizer(where)
    template = read_chat_template(folder)
    if template is None:
        template = read_chat_template(tokenizer.path.parent)
    tokenizer.chat_template = template
    with suppress(FileNotFoundError, ValueError):  # reported when the folder is checked
        tokenizer.rows = read_text_config(folder)["vocab_size"]
    return tokenizer


def _beside(folder: Path) -> Path:
    """The folder, or its parent if only that has a tokenizer, as with flax checkpoints."""
    found = [
        path
        for path in (folder, folder.parent)
        if any((path / name).is_file() for name in (SENTENCEPIECE, JSON))
    ]
    return found[0] if found else folder


def read_tokenizer(where: Path) -> Tokenizer:
    """Reads the tokenizer of a file or folder; `tokenizer.json` precedes, as in transformers.

    Raises:
        FileNotFoundError: if there is no tokenizer.
        ValueError: if it cannot be read, or is not a Gemma tokenizer.
    """
    path = where
    if not where.is_file():
        found = [where / name for name in (JSON, SENTENCEPIECE) if (where / name).is_file()]
        if not found:
            raise FileNotFoundError(
                f"no tokenizer at {where}: it has neither {SENTENCEPIECE} nor {JSON}; set "
                "model.tokenizer if the tokenizer is elsewhere"
            )
        path = found[0]
    if path.suffix == ".json":
        return _JsonTokenizer(path)
    return _SentencePieceTokenizer(path)


class _SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._processor = SentencePieceProcessor()
        content = path.read_bytes()
        try:
            self._processor.load_from_serialized_proto(content)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
        ids = filter(None, map(self.find, (*MARKERS, *CHANNEL)))
        hidden = [id_ for id_ in ids if self._processor.is_control(id_)]
        if hidden:
            self._processor.load_from_serialized_proto(_readable(content, hidden))
        self.vocab_size = self._processor.vocab_size()
        self._silent = frozenset(self._silent_ids())
        self._finish()

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._processor.encode(text), dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        ids = (int(token) for token in tokens)
        text: str = self._processor.decode([id_ for id_ in ids if id_ not in self._silent])
        return text

    def find(self, piece: str) -> int | None:
        id_: int = self._processor.piece_to_id(piece)
        return id_ if self._processor.id_to_piece(id_) == piece else None

    def piece(self, id_: int) -> str:
        return self._processor.id_to_piece(id_)

    def _silent_ids(self) -> list[int]:
        processor = self._processor
        ids = range(self.vocab_size)
        silent = [id_ for id_ in ids if processor.is_control(id_) or processor.is_unknown(id_)]
        return silent + [id_ for marker in MARKERS if (id_ := self.find(marker)) is not None]


def _readable(content: bytes, ids: Sequence[int]) -> bytes:
    """The model with these control pieces as user-defined ones.

    A control piece is neither found in a text that is encoded nor part of a decoded one: turns
    would be spelled out, and the thoughts of Gemma 4 would not be separated from its answer.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto  # late: few models need it

    model = proto.ModelProto.FromString(content)
    for id_ in ids:
        model.pieces[id_].type = proto.ModelProto.SentencePiece.USER_DEFINED
    changed: bytes = model.SerializeToString()
    return changed


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class _JsonTokenizer(Tokenizer):
    """A `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  # the library raises nothing narrower
            raise ValueError(f"{path} is not a Hugging Face tokenizer: {error}") from None
        # Disable settings of the file that change texts.
        self._inner.no_truncation()
        self._inner.no_padding()
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._bytes = {
            id_: int(match[1], 16)
            for piece, id_ in vocabulary.items()
            if (match := _BYTE.fullmatch(piece))
        }
        added = self._inner.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        names = (*MARKERS, "<unk>", *(token.content for token in added.values() if token.special))
        self._silent = frozenset(
            vocabulary[name] for name in names if name in vocabulary and name not in CHANNEL
        )
        self._finish()

    def encode(self, text: str) -> np.ndarray:
        # Every other special token in the text becomes one id, too.
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        ids = [id_ for id_ in map(int, tokens) if id_ not in self._silent]
        parts = []
        # The library's decoder merges invalid bytes with valid ones.
        for is_bytes, run in groupby(ids, key=self._bytes.__contains__):
            if is_bytes:
                parts.append(_utf8(bytes(self._bytes[id_] for id_ in run)))
            else:
                parts.append(self._inner.decode(list(run), skip_special_tokens=False))
        return "".join(parts)

    def find(self, piece: str) -> int | None:
        return self._inner.token_to_id(piece)

    def piece(self, id_: int) -> str:
        return self._inner.id_to_token(id_) or ""  # empty: an unused id


def _utf8(data: bytes) -> str:
    """Decodes UTF-8; each byte of an incomplete character becomes U+FFFD."""
    return re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", errors="surrogateescape"))
