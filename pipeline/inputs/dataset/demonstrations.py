"""The worked examples of the supervised phase: a prompt as in training, and what to write then.

Rows that cannot be used are refused or reported as those of a split are. Order is not decided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from pipeline.contracts.rollouts import Demonstration
from pipeline.inputs.dataset.rows import (
    DataError,
    Malformed,
    Row,
    TooLong,
    refuse_malformed,
    report_lines,
)
from pipeline.inputs.dataset.sources import read_rows
from pipeline.inputs.text.prompts import PromptMaker


@dataclass(frozen=True)
class LoadedDemonstrations:
    """The examples and what became of the other rows.

    Attributes:
        examples: in the dataset's order.
        malformed: rows that cannot be used.
        too_long: rows that are longer than `rollout.max_tokens` in all.
        duplicates: examples that repeat an earlier one; they are kept.
        overlaps: examples taken out because their prompt stands in a split that is measured.
    """

    examples: tuple[Demonstration, ...]
    malformed: tuple[Malformed, ...]
    too_long: tuple[TooLong, ...]
    duplicates: int
    overlaps: int

    @property
    def fingerprint(self) -> str:
        """A hash of the examples: ids and tokens."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.examples:
            tokens = example.prompt_tokens.tolist(), example.completion_tokens.tolist()
            digest.update(repr((example.id, tokens)).encode())
        return digest.hexdigest()

    @property
    def report(self) -> tuple[str, ...]:
        """A line for all and one for each malformed row, at most 10."""
        return tuple(
            report_lines(
                f"sft: {len(self.examples)} examples",
                malformed=self.malformed,
                too_long=len(self.too_long),
                overlaps=self.overlaps,
                duplicates=self.duplicates,
            )
        )


def load_examples(
    config: Config, maker: PromptMaker, *, measured: AbstractSet[str]
) -> LoadedDemonstrations:
    """The rows of `sft.train` as examples.

    A completion is the completion column's text and the token that ends it: `<end_of_turn>` after
    turns, `<eos>` after plain prompts. With `prompt.answer_prefix` the text must begin with it; the
    prefix is part of the prompt, as in training, and the rest is the completion.

    Args:
        config: where they are and how long they may be.
        maker: makes the prompts.
        measured: texts of the prompts that are measured, which no example may have.

    Raises:
        DataError: if they cannot be read, have malformed rows that `data.malformed` refuses, or
            none is left.
    """
    source, column = config.sft.train, config.sft.completion_column
    assert source is not None, "only a warm start has examples"
    encoder = _Encoder(config, maker)
    rows, malformed = read_rows(
        source, columns=tuple(dict.fromkeys((*maker.columns, column))), where="sft.train"
    )
    examples, too_long, overlaps = list[Demonstration](), list[TooLong](), 0
    for row in rows:
        prompt = maker.make(row)
        completion = encoder.encode(row)
        if isinstance(prompt, Malformed) or isinstance(completion, Malformed):
            malformed += [bad for bad in (prompt, completion) if isinstance(bad, Malformed)][:1]
        elif len(prompt.tokens) + len(completion) > config.rollout.max_tokens:
            too_long.append(TooLong(row.number, len(prompt.tokens) + len(completion)))
        elif prompt.text in measured:
            overlaps += 1
        else:
            examples.append(Demonstration(row.number, prompt.tokens, completion))
    malformed.sort(key=lambda bad: bad.row)
    refuse_malformed(malformed, path=source.path, where="sft.train", policy=config.data.malformed)
    if not examples:
        raise DataError(
            f"sft.train: no example is left: {len(malformed)} rows are malformed, "
            f"{len(too_long)} are longer than rollout.max_prompt_tokens + max_new_tokens = "
            f"{config.rollout.max_tokens}, and {overlaps} stand in a split that is measured"
        )
    return LoadedDemonstrations(
        tuple(examples),
        malformed=tuple(malformed),
        too_long=tuple(too_long),
        duplicates=len(examples) - len({_key(example) for example in examples}),
        overlaps=overlaps,
    )


class _Encoder:
    """Turns the completion column's text into tokens."""

    def __init__(self, config: Config, maker: PromptMaker) -> None:
        """Finds the tokens with a meaning.

        Raises:
            DataError: if the policy would not stop where a completion ends.
        """
        self._column = config.sft.completion_column
        self._tokenizer, self._prefix = maker.tokenizer, maker.prompt.answer_prefix
        end, stops = maker.end_of_completion, config.rollout.stop_tokens
        if end not in stops:
            raise DataError(
                f"sft.train: its completions end with {end}, which is not among "
                f"rollout.stop_tokens = {list(stops)}; add it"
            )
        self._end = self._tokenizer.piece_id(end)
        self._odd = {
            self._tokenizer.piece_id(piece): f"{kind} token {piece}"
            for kind, pieces in (("stop", stops), ("forbidden", config.rollout.forbidden_tokens))
            for piece in pieces
        }

    def encode(self, row: Row) -> np.ndarray | Malformed:
        """The completion's tokens, int32 `seq`, or why the policy could not write them."""
        text = str(row.values[self._column])
        if not text.startswith(self._prefix):
            what = f"does not begin with prompt.answer_prefix = {self._prefix!r}"
            return Malformed(row.number, f"column {self._column!r} {what}")
        tokens = self._tokenizer.encode(text.removeprefix(self._prefix))
        for token in tokens.tolist():
            if token in self._odd:
                what = f"column {self._column!r} holds the {self._odd[token]}"
                return Malformed(row.number, what)
        return np.append(tokens, self._end).astype(np.int32)


def _key(example: Demonstration) -> tuple[bytes, bytes]:
    return example.prompt_tokens.tobytes(), example.completion_tokens.tobytes()
