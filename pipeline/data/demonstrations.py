"""Loads the demonstrations of the SFT phase: prompts as in training, with completions.

Malformed rows are refused or reported as in splits. The order of training is not decided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from pipeline.data.rows import Malformed, Row, TooLong, list_rows
from pipeline.data.sources import Columns, read_rows
from pipeline.data.text.prompts import PromptMaker
from pipeline.types import Demonstration


@dataclass(frozen=True)
class LoadedDemonstrations:
    """The demonstrations in the dataset's order, and the rows that were excluded.

    Attributes:
        duplicates: number of demonstrations that repeat an earlier one; they are kept.
        overlaps: number of demonstrations excluded because an evaluation split has their prompt.
    """

    demonstrations: tuple[Demonstration, ...]
    malformed: tuple[Malformed, ...]
    too_long: tuple[TooLong, ...]
    duplicates: int
    overlaps: int

    @property
    def fingerprint(self) -> str:
        """A hash of the demonstrations: ids and tokens."""
        digest = hashlib.blake2b(digest_size=16)
        for one in self.demonstrations:
            tokens = one.prompt_tokens.tolist(), one.completion_tokens.tolist()
            digest.update(repr((one.id, tokens)).encode())
        return digest.hexdigest()


def load_demonstrations(
    config: Config, maker: PromptMaker, *, measured: AbstractSet[str]
) -> LoadedDemonstrations:
    """Loads the rows of `sft.train`.

    A completion is the text of the completion column, or without it the last turn of a row in chat
    format, and its end token: that of the turn with turns, `<eos>` with plain prompts. With
    `prompt.answer_prefix` the text must begin with the prefix, which becomes part of the prompt, as
    in GRPO; the rest is the completion.

    Demonstrations with a prompt in `measured`, the texts of the evaluation prompts, are excluded.

    Raises:
        ValueError: if the source cannot be read, has malformed rows that `data.malformed` refuses,
            or no demonstration is left.
    """
    source, column = config.sft.train, config.sft.completion_column
    assert source is not None, "there is no SFT phase"
    encode, most = _encoder(config, maker), config.rollout.max_tokens

    def make(row: Row) -> tuple[str, Demonstration] | Malformed | TooLong:
        prompt, completion = maker.make(row), encode(row)
        if isinstance(prompt, Malformed):
            return prompt
        if isinstance(completion, Malformed):
            return completion
        one = Demonstration(row.number, prompt.tokens, completion)
        return TooLong(row.number, len(one)) if len(one) > most else (prompt.text, one)

    made, malformed, too_long = read_rows(
        source,
        columns=Columns.of_prompts(maker.prompt.template).with_completions(column),
        where="sft.train",
        policy=config.data.malformed,
        make=make,
    )
    demonstrations = tuple(one for text, one in made if text not in measured)
    overlaps = len(made) - len(demonstrations)
    if not demonstrations:
        raise ValueError(
            f"sft.train: no demonstration is left: {len(malformed)} rows are malformed, "
            f"{len(too_long)} are longer than rollout.max_prompt_tokens + max_new_tokens = "
            f"{most}, and {overlaps} are in an evaluation split"
            + "".join(f"\n{line}" for line in list_rows(malformed))
        )
    distinct = {
        (one.prompt_tokens.tobytes(), one.completion_tokens.tobytes()) for one in demonstrations
    }
    duplicates = len(demonstrations) - len(distinct)
    return LoadedDemonstrations(demonstrations, malformed, too_long, duplicates, overlaps)


def _encoder(config: Config, maker: PromptMaker) -> Callable[[Row], np.ndarray | Malformed]:
    """What makes a row's completion tokens, int32 `seq`.

    Rows whose completion the policy cannot generate are malformed.
    """
    column, tokenizer, prefix = (
        config.sft.completion_column,
        maker.tokenizer,
        maker.prompt.answer_prefix,
    )
    end, stops = maker.end_of_completion, config.rollout.stop_tokens
    if tokenizer.piece_id(end) not in map(tokenizer.piece_id, stops):
        raise ValueError(
            f"sft.train: completions end with {end}, which is not in rollout.stop_tokens = "
            f"{list(stops)}; add it"
        )
    kinds = {"stop": stops, "forbidden": config.rollout.forbidden_tokens}
    reserved = {
        tokenizer.piece_id(piece): f"{kind} token {piece}"
        for kind, pieces in kinds.items()
        for piece in pieces
    }

    def encode(row: Row) -> np.ndarray | Malformed:
        where, text = f"column {column!r}", str(row.values.get(column))
        if column not in row.values:
            if row.reply is None:
                what = f"the last turn is the user's, and there is no {where}"
                return Malformed(row.number, what)
            where, text = "the last turn", row.reply
        if not text.startswith(prefix):
            what = f"does not begin with prompt.answer_prefix = {prefix!r}"
            return Malformed(row.number, f"{where} {what}")
        tokens = tokenizer.encode(text.removeprefix(prefix))
        if problem := tokenizer.problem_of(tokens):
            return Malformed(row.number, f"{where} {problem}")
        for token in tokens.tolist():
            if token in reserved:
                return Malformed(row.number, f"{where} contains the {reserved[token]}")
        return np.append(tokens, tokenizer.piece_id(end)).astype(np.int32)

    return encode
