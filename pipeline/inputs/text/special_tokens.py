"""Whether tokenizer and model belong together, as far as sizes and special tokens tell. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from reprlib import repr as show
from typing import Any

from pipeline.inputs.hub.hf_folder import read_object, read_text_config
from pipeline.inputs.text.chat import END_OF_TURN
from pipeline.inputs.text.tokenizer import Tokenizer

_MOST_PADDING = 1024
"""Embeddings may have more rows than the tokenizer has pieces, to be a multiple of something."""

_MOST_SHOWN = 8


def check_tokenizer(
    tokenizer: Tokenizer, *, folder: Path, vocab_size: int | None, stop_tokens: Sequence[str]
) -> None:
    """Refuses a tokenizer that contradicts the model.

    Args:
        tokenizer: the one to be used.
        folder: the model's; its `config.json` and `generation_config.json` are read if they are
            there.
        vocab_size: rows of the embedding; None: what `config.json` says, if it is there.
        stop_tokens: pieces that end a completion.

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
        said = read_object(generation)
        problems += _id_problems(tokenizer, said, generation.name, stop_tokens)
    if problems:
        hint = f"is {tokenizer.path} the tokenizer of another model? model.tokenizer names the file"
        raise ValueError("\n".join([*dict.fromkeys(problems), hint]))


def _size_problems(tokenizer: Tokenizer, rows: int) -> list[str]:
    sizes = f"{tokenizer.path} has {tokenizer.vocab_size} pieces, the model's embedding {rows} rows"
    if tokenizer.vocab_size > rows:
        return [f"{sizes}; each piece needs one"]
    if rows - tokenizer.vocab_size > _MOST_PADDING:
        return [f"{sizes}; no embedding is padded by more than {_MOST_PADDING}"]
    return []


def _id_problems(
    tokenizer: Tokenizer, said: dict[str, Any], file: str, stop_tokens: Sequence[str]
) -> Iterator[str]:
    ends = ("<eos>", END_OF_TURN, *stop_tokens)
    for key, pieces in (("bos_token_id", ("<bos>",)), ("eos_token_id", ends)):
        found = said.get(key)
        right = [tokenizer.find(piece) for piece in pieces]
        ids = found if isinstance(found, list) else [found]
        wrong = [id_ for id_ in ids if id_ is not None and not (_is_id(id_) and id_ in right)]
        for id_ in wrong[:_MOST_SHOWN]:
            known = _is_id(id_) and 0 <= id_ < tokenizer.vocab_size
            what = repr(tokenizer.piece(id_)) if known else "no piece"
            allowed = " or ".join(dict.fromkeys(pieces))
            yield f"{file}: {key} is {show(id_)}, in {tokenizer.path} that is {what}, not {allowed}"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
