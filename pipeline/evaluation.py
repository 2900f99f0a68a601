"""Accuracy on a split: prompts, tags and judges as in training, one completion a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipeline.datatypes import Completion, Phase, Prompt, RolloutName, RolloutRequest
from pipeline.significance import Accuracy, compare_paired, measure_accuracy
from pipeline.tokenizer import Tokenizer
from rewards.answers import is_correct
from rewards.base import Tags
from rewards.format import is_well_formed


@dataclass(frozen=True)
class Answer:
    """One item of an evaluation."""

    prompt_id: int
    text: str
    answer: str
    correct: bool
    well_formed: bool
    num_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """The answers to a split, in the order of its prompts."""

    answers: tuple[Answer, ...]

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]]) -> Evaluation:
        """From what `rows` returned."""
        return Evaluation(tuple(Answer(**row) for row in rows))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The answers as JSON objects."""
        return [asdict(answer) for answer in self.answers]

    @property
    def correct(self) -> np.ndarray:
        """Which answers are right, bool `prompts`."""
        return np.array([answer.correct for answer in self.answers], dtype=bool)

    @property
    def well_formed(self) -> np.ndarray:
        """Which completions have the asked-for form, bool `prompts`."""
        return np.array([answer.well_formed for answer in self.answers], dtype=bool)

    @property
    def accuracy(self) -> Accuracy:
        """Share of right answers."""
        return measure_accuracy(self.correct)

    def summary(self) -> dict[str, Any]:
        """Accuracy with its interval, and how much of it is form."""
        formed = self.well_formed
        among = float(self.correct[formed].mean()) if formed.any() else None
        return {
            **asdict(self.accuracy),
            "well_formed": float(formed.mean()),
            "accuracy_among_well_formed": among,
            "num_tokens_mean": float(np.mean([answer.num_tokens for answer in self.answers])),
        }


def requests(prompts: Sequence[Prompt], *, phase: Phase) -> list[RolloutRequest]:
    """One request a prompt. Names do not depend on when: base and tuned get the same noise."""
    return [
        RolloutRequest(RolloutName(phase, 0, prompt.id, 0), prompt.tokens) for prompt in prompts
    ]


def judge(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    tokenizer: Tokenizer,
    tags: Tags,
) -> Evaluation:
    """Judges the completions of `requests(prompts)`."""
    answers = []
    for prompt, completion in zip(prompts, completions, strict=True):
        text = tokenizer.decode(completion.tokens)
        answers.append(
            Answer(
                prompt_id=prompt.id,
                text=text,
                answer=prompt.answer,
                correct=is_correct(text, answer=prompt.answer, tags=tags),
                well_formed=is_well_formed(text, stop_reason=completion.stop_reason, tags=tags),
                num_tokens=len(completion.tokens),
            )
        )
    return Evaluation(tuple(answers))


def compare(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """The part of `summary.json` called `eval`."""
    change = compare_paired(before.correct, after.correct)
    return {
        "before": before.summary(),
        "after": after.summary(),
        "paired_difference": change.difference,
        "paired_ci95": list(change.ci95),
        "paired_p": change.p,
    }
