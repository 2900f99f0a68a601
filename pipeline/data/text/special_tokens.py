"""Checks that tokenizer and model match in vocabulary size and special tokens. No JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from reprlib import repr as show
from typing import Any

from pipeline.data.models.hf_folder import read_object, read_text_config
from pipeline.data.text.tokenizer import Tokenizer

_MOST_PADDING = 1024
"""Maximum number of padding rows of an embedding beyond the tokenizer's vocabulary."""

_MOST_SHOWN = 8
_MARKER = re.compile(r"<\|\w+\|?>|<\w+\|>|<(?!bos|pad|unk|mask|unused|0x)\w+>")
"""Special pieces that may end a turn, such as the `<|im_end|>` of other templates."""
_STOP = "if the model ends its turns with it, add it to rollout.stop_tokens"


def check_tokenizer(
    tokenizer: Tokenizer, *, folder: Path, vocab_size: int | None, stop_tokens: Sequence[str]
) -> None:
    """Refuses a tokenizer that does not match the model.

    Args:
        tokenizer: the tokenizer.
        folder: the model's folder; its `config.json` and `generation_config.json` are read if they
            exist.
        vocab_size: rows of the embedding; None: the value of `config.json`, if it exists.
        stop_tokens: pieces that end a completion.

    Raises:
        ValueError: with a line for each contradiction. Pieces that were added to the vocabulary may
            lack a row.
    """
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = read_text_config(folder)
    rows = vocab_size or config.get("vocab_size")
    problems = [] if rows is None else _size_problems(tokenizer, rows)
    problems += _id_problems(tokenizer, config, "config.json", stop_tokens)
    generation = folder / "generation_config.json"
    if generation.is_file():
        settings = read_object(generation)
        problems += _id_problems(tokenizer, settings, generation.name, stop_tokens)
    if problems:
        lines = list(dict.fromkeys(problems))
        if not all(_STOP in line for line in lines):
            lines.append(f"is {tokenizer.path} the tokenizer of another model? set model.tokenizer")
        raise ValueError("\n".join(lines))


def _size_problems(tokenizer: Tokenizer, rows: int) -> list[str]:
    sizes = f"{tokenizer.path} has {tokenizer.vocab_size} pieces, the model's embedding {rows} rows"
    beyond = set(range(rows, tokenizer.vocab_size)) - tokenizer.added_ids
    if any(map(tokenizer.piece, beyond)):
        return [f"{sizes}; each piece needs a row"]
    if rows - tokenizer.vocab_size > _MOST_PADDING:
        return [f"{sizes}; at most {_MOST_PADDING} rows of padding are accepted"]
    return []


def _id_problems(
    tokenizer: Tokenizer, settings: dict[str, Any], file: str, stop_tokens: Sequence[str]
) -> Iterator[str]:
    turns = tokenizer.turns
    ends = ("<eos>", turns.end, *turns.other_ends, *stop_tokens)
    for key, pieces in (("bos_token_id", ("<bos>",)), ("eos_token_id", ends)):
        found = settings.get(key)
        valid = [tokenizer.find(piece) for piece in pieces]
        ids = found if isinstance(found, list) else [found]
        wrong = [id_ for id_ in ids if id_ is not None and not (_is_id(id_) and id_ in valid)]
        for id_ in wrong[:_MOST_SHOWN]:
            known = _is_id(id_) and 0 <= id_ < tokenizer.vocab_size
            what = repr(tokenizer.piece(id_)) if known else "no piece"
            allowed = " or ".join(dict.fromkeys(pieces))
            where = f"in {tokenizer.path}"
            ends_turn = key == "eos_token_id" and known and _MARKER.fullmatch(tokenizer.piece(id_))
            remedy = f"; {_STOP}" if ends_turn else ""
            yield f"{file}: {key} is {show(id_)}, which is {what} {where}, not {allowed}{remedy}"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
