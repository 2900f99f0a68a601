"""Accuracy on a split by the `eval` protocol, with the prompts, tags and judges of training.

The result depends only on prompts, protocol and policy, not on batch size, padding or sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipeline.contracts.rollouts import (
    Completion,
    Prompt,
    RolloutName,
    RolloutPhase,
    RolloutRequest,
    StopReason,
)
from pipeline.evaluate.significance import Accuracy, compare_paired, measure_accuracy, pass_at
from pipeline.inputs.text.prompts import PromptMaker
from rewards.answers import Extraction, answer_key, find_answer, same_answer
from rewards.base import Tags
from rewards.format import is_well_formed


@dataclass(frozen=True)
class Answer:
    """One sample of one item of an evaluation.

    Attributes:
        prompt_id: id of the prompt.
        sample: number of the sample, from 0.
        text: `prompt.answer_prefix` and the completion.
        answer: the reference answer.
        found: the answer in the text; None: there is none.
        correct: whether `found` equals `answer`.
        well_formed: whether the text has the requested format and ended before the token limit.
        stop_reason: why sampling ended.
        num_tokens: number of sampled tokens.
    """

    prompt_id: int
    sample: int
    text: str
    answer: str
    found: str | None
    correct: bool
    well_formed: bool
    stop_reason: StopReason
    num_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """The answers to a split: in the order of its prompts, the same number of samples of each."""

    answers: tuple[Answer, ...]

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]]) -> Evaluation:
        """Reads the result of `rows`."""
        return Evaluation(tuple(Answer(**row) for row in rows))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The answers as JSON objects, one for each sample."""
        return [asdict(answer) for answer in self.answers]

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return max(answer.sample for answer in self.answers) + 1

    @property
    def correct(self) -> np.ndarray:
        """Which answers are right, bool `prompts samples`."""
        return self._flags([answer.correct for answer in self.answers])

    @property
    def well_formed(self) -> np.ndarray:
        """Which completions have the requested format, bool `prompts samples`."""
        return self._flags([answer.well_formed for answer in self.answers])

    @property
    def accuracy(self) -> Accuracy:
        """Share of right answers."""
        return measure_accuracy(self.correct)

    def first(self, prompts: int) -> Evaluation:
        """The answers to the first `prompts` prompts."""
        return Evaluation(self.answers[: prompts * self.samples])

    def majority_at(self, k: int) -> float:
        """Share of right answers if `k` samples vote (self-consistency, arXiv:2203.11171).

        Equivalent answers count as one, samples without an answer do not vote, and the earliest
        answer wins a tie. Each prompt's samples are split into as many groups of `k` as possible;
        the mean is over all groups.
        """
        elections = [
            answers[start : start + k]
            for answers in self._by_prompt()
            for start in range(0, self.samples - k + 1, k)
        ]
        return float(np.mean([_wins(voters) for voters in elections]))

    def summary(self) -> dict[str, Any]:
        """Accuracy with its interval, and shares of completions by format and ending.

        `format_only` is the share of completions with the requested format and a wrong answer,
        `unanswered` that without any answer, `truncated` that cut off at `rollout.max_new_tokens`.
        With several samples per prompt also `pass@k` and `majority@k`, k = 1, 2, 4, ... and all.
        """
        correct, formed = self.correct, self.well_formed
        among = float(correct[formed].mean()) if formed.any() else None
        return {
            **asdict(self.accuracy),
            "samples": self.samples,
            "well_formed": float(formed.mean()),
            "accuracy_among_well_formed": among,
            "format_only": float((formed & ~correct).mean()),
            "unanswered": _share([answer.found is None for answer in self.answers]),
            "truncated": _share([answer.stop_reason == "length" for answer in self.answers]),
            "num_tokens_mean": float(np.mean([answer.num_tokens for answer in self.answers])),
            **self._by_votes(correct),
        }

    def _by_votes(self, correct: np.ndarray) -> dict[str, float]:
        if self.samples == 1:
            return {}
        sizes = sample_counts(self.samples)
        passes = {f"pass@{k}": pass_at(correct, k) for k in sizes}
        return passes | {f"majority@{k}": self.majority_at(k) for k in sizes}

    def _by_prompt(self) -> list[tuple[Answer, ...]]:
        starts = range(0, len(self.answers), self.samples)
        return [self.answers[start : start + self.samples] for start in starts]

    def _flags(self, flags: Sequence[bool]) -> np.ndarray:
        return np.array(flags, dtype=bool).reshape(-1, self.samples)


def sample_counts(samples: int) -> list[int]:
    """1, 2, 4, ... below the number of samples, and that number."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*powers, samples]


def requests(
    prompts: Sequence[Prompt], *, phase: RolloutPhase, samples: int = 1
) -> list[RolloutRequest]:
    """`samples` requests for each prompt, prompt by prompt.

    Names do not depend on the step: base and tuned policy get the same noise.
    """
    return [
        RolloutRequest(RolloutName(phase, 0, prompt.id, sample), prompt.tokens)
        for prompt in prompts
        for sample in range(samples)
    ]


def judge(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    maker: PromptMaker,
    tags: Tags,
    extraction: Extraction = "tags",
) -> Evaluation:
    """Judges the completions of `requests(prompts)`.

    Raises:
        ValueError: if they are completions of other requests.
    """
    samples, rest = divmod(len(completions), len(prompts))
    requested = [(prompt, sample) for prompt in prompts for sample in range(samples)]
    names = [(completion.name.prompt_id, completion.name.sample) for completion in completions]
    if rest or names != [(prompt.id, sample) for prompt, sample in requested]:
        raise ValueError(
            f"{len(completions)} completions are not those of {len(prompts)} prompts in their order"
        )
    answers = []
    for (prompt, sample), completion in zip(requested, completions, strict=True):
        text = maker.text_of(completion)
        found = find_answer(text, tags=tags, extraction=extraction)
        answers.append(
            Answer(
                prompt_id=prompt.id,
                sample=sample,
                text=text,
                answer=prompt.answer,
                found=found,
                correct=found is not None and same_answer(found, prompt.answer),
                well_formed=is_well_formed(text, stop_reason=completion.stop_reason, tags=tags),
                stop_reason=completion.stop_reason,
                num_tokens=len(completion.tokens),
            )
        )
    return Evaluation(tuple(answers))


def compare(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Both summaries and the change between them, as in `summary.json` under `eval`."""
    change = compare_paired(before.correct, after.correct)
    return {
        "before": before.summary(),
        "after": after.summary(),
        "paired_difference": change.difference,
        "paired_ci95": list(change.ci95),
        "paired_p": change.p,
        "paired_test": change.test,
        "gained": change.gained,
        "lost": change.lost,
    }


def _wins(voters: Sequence[Answer]) -> bool:
    """Whether the answer with the most votes is right."""
    votes: dict[object, list[Answer]] = {}
    for voter in voters:
        if voter.found is not None:
            votes.setdefault(answer_key(voter.found), []).append(voter)
    # `max` returns the first of equals: dictionaries keep the order of insertion.
    return bool(votes) and max(votes.values(), key=len)[0].correct


def _share(flags: Sequence[bool]) -> float:
    return float(np.mean(flags))
