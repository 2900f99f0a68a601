"""The metric on a split by the `eval` protocol, with the prompts, tags and judges of training.

The metric is the accuracy, or the mean score of a reward. A reward that gives 1 to right answers
and 0 to wrong ones is an accuracy (`Config.has_accuracy_reward`). Rewards score as in training,
except that an error excludes one answer, whatever `on_error` is, and that `rewards.shuffle` does
not apply. The result depends only on prompts, protocol and policy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from configs.evaluation import EXACT_ANSWER, WEIGHTED_SUM
from configs.schema import Config
from pipeline.data.text.prompts import PromptMaker
from pipeline.evaluate.score_statistics import compare_scores, mean_score, measure_scores
from pipeline.evaluate.significance import (
    Accuracy,
    PairedChange,
    compare_paired,
    measure_accuracy,
    pass_at,
)
from pipeline.evaluate.summary import ACCURACY, SCORE
from pipeline.rollout.scoring import reward_inputs, score_one
from pipeline.types import (
    Completion,
    Prompt,
    Rollout,
    RolloutName,
    RolloutPhase,
    RolloutRequest,
    StopReason,
)
from rewards.answers import answer_key, find_answer, same_answer
from rewards.base import Outcome, RewardInput, Tags
from rewards.format import is_well_formed

Score = Callable[[Sequence[RewardInput]], Awaitable[list[dict[str, Outcome]]]]
"""Returns for each input the outcome of each reward function, by name."""

_OF_REWARDS = ("rewards", "score", "errors", "reward")
"""Fields of an answer that only those have that the reward functions scored."""


@dataclass(frozen=True)
class Answer:
    """One sample, numbered from 0, of one prompt of an evaluation.

    Attributes:
        text: `prompt.answer_prefix` and the completion.
        answer: the reference answer, if there is one.
        found: the answer in the text; None: there is none, or no reference answer.
        correct: whether it is right: by the metric if that is a reward and an accuracy, else
            whether `found` equals `answer`; None where that is not known.
        well_formed: whether the text has the requested format and ended before the token limit.
        rewards: the parts, as in `Rollout.rewards`; empty if the answer was not scored.
        score: value of a reward metric; None: excluded, by an error or because it does not apply.
        errors: why parts failed, by name.
        reward: the weighted sum of the parts; None: excluded, or not scored.
    """

    prompt_id: int
    sample: int
    text: str
    answer: str | None
    found: str | None
    correct: bool | None
    well_formed: bool
    stop_reason: StopReason
    num_tokens: int
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    score: float | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    reward: float | None = None
    prompt: str = ""


@dataclass(frozen=True)
class Evaluation:
    """The answers to a split: prompt by prompt, the same number of samples of each.

    `of_accuracy` says whether the metric is a reward that gives 1 to right answers and 0 to others.
    """

    answers: tuple[Answer, ...]
    metric: str = EXACT_ANSWER
    of_accuracy: bool = False

    @staticmethod
    def of(
        rows: Sequence[Mapping[str, Any]], *, metric: str = EXACT_ANSWER, of_accuracy: bool = False
    ) -> Evaluation:
        """Reads the result of `rows`."""
        return Evaluation(tuple(Answer(**row) for row in rows), metric, of_accuracy)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len({answer.prompt_id for answer in self.answers})

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The answers as JSON objects, one for each sample."""
        unused = () if any(answer.rewards for answer in self.answers) else _OF_REWARDS
        rows = [asdict(answer) for answer in self.answers]
        return [{key: row[key] for key in row if key not in unused} for row in rows]

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return max(answer.sample for answer in self.answers) + 1

    @property
    def verdicts(self) -> np.ndarray:
        """Which answers are right, float `prompts samples`: 1, 0, or NaN where it is not known.

        By the metric if that is an accuracy, else by the reference answers.
        """
        if self.of_accuracy:
            return self.scores
        return self._array([answer.correct for answer in self.answers], float)

    @property
    def known(self) -> np.ndarray:
        """The prompts of which all answers are known to be right or wrong, bool `prompts`."""
        found: np.ndarray = ~np.isnan(self.verdicts).any(axis=1)
        return found

    @property
    def correct(self) -> np.ndarray:
        """Which answers to the `known` prompts are right, bool `prompts samples`."""
        return self.verdicts[self.known] == 1

    @property
    def well_formed(self) -> np.ndarray:
        """Which completions have the requested format, bool `prompts samples`."""
        return self._array([answer.well_formed for answer in self.answers], bool)

    @property
    def scores(self) -> np.ndarray:
        """Values of a reward metric, float `prompts samples`; NaN where there is none."""
        return self._array([answer.score for answer in self.answers], float)

    @property
    def errors(self) -> list[tuple[str, str]]:
        """Parts of the reward that failed, and why, answer by answer."""
        return [error for answer in self.answers for error in answer.errors.items()]

    @property
    def is_accuracy(self) -> bool:
        """Whether the metric is the share of right answers."""
        return self.metric == EXACT_ANSWER or self.of_accuracy

    @property
    def accuracy(self) -> Accuracy:
        """Share of right answers to the `known` prompts, of which there must be one."""
        return measure_accuracy(self.correct)

    @property
    def reward(self) -> float | None:
        """Mean of the weighted sum over the answers that have one; None if none has."""
        found = [answer.reward for answer in self.answers if answer.reward is not None]
        return float(np.mean(found)) if found else None

    @property
    def means(self) -> dict[str, float | None]:
        """What versions are compared by: the mean of the metric, as in `summary`, and `reward`."""
        if not self.is_accuracy:
            return {SCORE: mean_score(self.scores), "reward": self.reward}
        accuracy = self.accuracy.accuracy if self.known.any() else None
        return {ACCURACY: accuracy, "reward": self.reward}

    def first(self, prompts: int) -> Evaluation:
        """The answers to the first `prompts` prompts."""
        return replace(self, answers=self.answers[: prompts * self.samples])

    def majority_at(self, k: int) -> float:
        """Share of right answers if `k` samples vote (self-consistency, arXiv:2203.11171).

        Equivalent answers count as one, samples without an answer do not vote, and the earliest
        answer wins a tie. Each prompt's samples are split into as many groups of `k` as possible;
        the mean is over all groups.
        """
        starts = [
            prompt * self.samples + first
            for prompt in np.flatnonzero(self.known)
            for first in range(0, self.samples - k + 1, k)
        ]
        return _share([_wins(self.answers[start : start + k]) for start in starts])

    def summary(self) -> dict[str, Any]:
        """The metric's mean with its interval, and shares of completions by format and ending.

        `format_only` is the share of completions with the requested format and a wrong answer,
        `unanswered` that without any answer, `truncated` that cut off at `rollout.max_new_tokens`.
        With several samples per prompt also `pass@k` and `majority@k`, k = 1, 2, 4, ... and all.
        All that depends on right and wrong needs reference answers.

        With a reward metric `n` and `ci95` are those of the prompts that have a score, out of
        `prompts`; `excluded` is the share of answers without one. If it is no accuracy, `score` is
        in its place, and `correct` is the share of right answers. `reward` and `reward/NAME` are
        the means of the weighted sum and of each part, where the reward functions scored.
        """
        return {
            "metric": self.metric,
            **self._metric_facts(),
            **self._reward_facts(),
            "samples": self.samples,
            "well_formed": float(self.well_formed.mean()),
            **self._reference_facts(),
            "truncated": _share([answer.stop_reason == "length" for answer in self.answers]),
            "num_tokens_mean": float(np.mean([answer.num_tokens for answer in self.answers])),
            **self._votes(),
        }

    def _metric_facts(self) -> dict[str, Any]:
        """The mean of the metric with its interval, and how many answers have no value."""
        facts: dict[str, Any] = {"accuracy": None, "n": 0, "ci95": None}
        if not self.is_accuracy:
            facts = asdict(measure_scores(self.scores))
        elif self.known.any():
            facts = asdict(self.accuracy)
        if self.metric == EXACT_ANSWER:
            return facts
        excluded = _share([answer.score is None for answer in self.answers])
        return {**facts, "prompts": self.prompts, "excluded": excluded}

    def _reward_facts(self) -> dict[str, float]:
        values: dict[str, list[float]] = {}
        for name, value in (part for answer in self.answers for part in answer.rewards.items()):
            if value is not None:
                values.setdefault(f"reward/{name}", []).append(value)
        means = {name: float(np.mean(own)) for name, own in values.items()}
        return means if self.reward is None else {"reward": self.reward, **means}

    def _reference_facts(self) -> dict[str, float | None]:
        known = [answer for answer in self.answers if answer.correct is not None]
        if not known:
            return {}
        formed = [bool(answer.correct) for answer in known if answer.well_formed]
        share: dict[str, float | None] = (
            {"accuracy_among_well_formed": _share(formed) if formed else None}
            if self.is_accuracy
            else {"correct": _share([bool(answer.correct) for answer in known])}
        )
        return {
            **share,
            "format_only": _share([one.well_formed and not one.correct for one in known]),
            "unanswered": _share([answer.found is None for answer in known]),
        }

    def _votes(self) -> dict[str, float]:
        correct, samples = self.correct, self.samples
        if samples == 1 or not len(correct):
            return {}
        powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
        sizes = [*powers, samples]
        passes = {f"pass@{k}": pass_at(correct, k) for k in sizes}
        return passes | {f"majority@{k}": self.majority_at(k) for k in sizes}

    def _array(self, values: Sequence[float | None], dtype: type) -> np.ndarray:
        return np.array(values, dtype=dtype).reshape(-1, self.samples)


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


async def evaluate(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    config: Config,
    maker: PromptMaker,
    score: Score | None,
) -> Evaluation:
    """Judges the completions of `requests(prompts)` by the protocol of the configuration.

    `score` calls the reward functions, which reward metrics need; None: answers are not scored.
    """
    scored = list[Rollout]()
    assert score is not None or not config.uses_rewards
    if score is not None:
        by_id = {prompt.id: prompt for prompt in prompts}
        inputs = reward_inputs(completions, by_id, maker=maker, tags=Tags.of_run(config))
        outcomes = await score(inputs)
        scored = [
            score_one(completion, one, parts, config)
            for completion, one, parts in zip(completions, inputs, outcomes, strict=True)
        ]
    return judge(prompts, completions, config=config, maker=maker, scored=scored)


def judge(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    config: Config,
    maker: PromptMaker,
    scored: Sequence[Rollout] = (),
) -> Evaluation:
    """Judges the completions of `requests(prompts)`.

    `scored` are the completions with their rewards, which reward metrics need; empty: none.
    """
    tags, metric, of_accuracy = Tags.of_run(config), config.metric, config.has_accuracy_reward
    samples = len(completions) // len(prompts)
    requested = [(prompt, sample) for prompt in prompts for sample in range(samples)]
    scores: Sequence[Rollout | None] = scored or [None] * len(completions)
    answers = []
    for (prompt, sample), completion, one in zip(requested, completions, scores, strict=True):
        name, text, reference = completion.name, maker.text_of(completion), prompt.answer
        assert (name.prompt_id, name.sample) == (prompt.id, sample), name
        found = correct = None
        if reference is not None:
            found = find_answer(text, tags=tags, extraction=config.extraction)
            correct = found is not None and same_answer(found, reference)
        scores_of = {} if one is None else _scores(one, metric)
        if of_accuracy:
            correct = None if (score := scores_of["score"]) is None else score == 1
        answers.append(
            Answer(
                prompt_id=prompt.id,
                sample=sample,
                text=text,
                answer=reference,
                found=found,
                correct=correct,
                well_formed=is_well_formed(text, stop_reason=completion.stop_reason, tags=tags),
                stop_reason=completion.stop_reason,
                num_tokens=len(completion.tokens),
                prompt=prompt.text,
                **scores_of,
            )
        )
    return Evaluation(tuple(answers), metric, of_accuracy)


def _scores(rollout: Rollout, metric: str) -> dict[str, Any]:
    """The fields of an answer that the reward functions have scored."""
    values = {**rollout.rewards, WEIGHTED_SUM: rollout.reward, EXACT_ANSWER: None}
    return {
        "rewards": rollout.rewards,
        "score": values[metric],
        "errors": {
            name: f"{error.cause}: {error.message}" for name, error in rollout.errors.items()
        },
        "reward": rollout.reward,
    }


def compare(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Both summaries and the change between them, as in `summary.json` under `eval`.

    With a reward metric the change is that of the prompts that have a score in both, `paired_n` of
    them; without such prompts difference, interval and p-value are None.
    """
    known = before.known & after.known
    if not before.is_accuracy:
        change = compare_scores(before.scores, after.scores)
    elif known.any():
        change = compare_paired(before.verdicts[known] == 1, after.verdicts[known] == 1)
    else:
        change = PairedChange()
    return {
        "before": before.summary(),
        "after": after.summary(),
        "paired_difference": change.difference,
        "paired_ci95": None if change.ci95 is None else list(change.ci95),
        "paired_p": change.p,
        "paired_test": change.test,
        "gained": change.gained,
        "lost": change.lost,
        **({} if before.metric == EXACT_ANSWER and change.n else {"paired_n": change.n}),
    }


def _wins(voters: Sequence[Answer]) -> bool:
    """Whether the answer with the most votes is right."""
    votes: dict[object, list[Answer]] = {}
    for voter in voters:
        if voter.found is not None:
            votes.setdefault(answer_key(voter.found), []).append(voter)
    # `max` returns the first of equals: dictionaries keep the order of insertion.
    return bool(votes) and bool(max(votes.values(), key=len)[0].correct)


def _share(flags: Sequence[bool]) -> float:
    return float(np.mean(flags))
