"""Checks that tokenizer and model match in vocabulary size and special tokens. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from reprlib import repr as show
from typing import Any

from pipeline.data.models.hf_folder import read_object, read_text_config
from pipeline.data.text.tokenizer import Tokenizer

_MOST_PADDING = 1024
"""Maximum number of padding rows of an embedding beyond the tokenizer's vocabulary."""
_STOP = "if the model ends its turns with it, add it to rollout.stop_tokens"


def check_tokenizer(
    tokenizer: Tokenizer, *, folder: Path, vocab_size: int | None, stop_tokens: Sequence[str]
) -> None:
    """Refuses a tokenizer that does not match `config.json` and `generation_config.json`, if any.

    Pieces that were added to the vocabulary may lack a row. `vocab_size` is the number of rows, by
    default that of `config.json`.

    Raises:
        ValueError: with a line for each contradiction.
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
        if not all(line.endswith(_STOP) for line in problems):
            problems.append(
                f"is {tokenizer.path} the tokenizer of another model? set model.tokenizer"
            )
        raise ValueError("\n".join(dict.fromkeys(problems)))


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
        for id_ in ids:
            if id_ is None or (_is_id(id_) and id_ in valid):
                continue
            known = _is_id(id_) and 0 <= id_ < tokenizer.vocab_size
            piece = tokenizer.piece(id_) if known else ""
            what = repr(piece) if known else "no piece"
            where, allowed = f"in {tokenizer.path}", " or ".join(dict.fromkeys(pieces))
            remedy = f"; {_STOP}" if key == "eos_token_id" and piece.startswith("<|") else ""
            yield f"{file}: {key} is {show(id_)}, which is {what} {where}, not {allowed}{remedy}"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
