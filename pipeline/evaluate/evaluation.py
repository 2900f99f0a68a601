"""The metric on a split by the `eval` protocol, with the prompts, tags and judges of training.

The metric is the accuracy, or with a reward as `eval.metric` the mean score. Reward functions are
called for reward metrics only. They score as in training, except that an error excludes one answer,
whatever `on_error` is, and that `rewards.shuffle` does not apply.

The result depends only on prompts, protocol and policy, not on batch size, padding or sampler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from configs.schema import EXACT_ANSWER, WEIGHTED_SUM, Config
from pipeline.contracts.rollouts import (
    Completion,
    Prompt,
    Rollout,
    RolloutName,
    RolloutPhase,
    RolloutRequest,
    StopReason,
)
from pipeline.evaluate.score_statistics import (
    ScoreChange,
    compare_scores,
    mean_score,
    measure_scores,
)
from pipeline.evaluate.significance import (
    Accuracy,
    PairedChange,
    compare_paired,
    measure_accuracy,
    pass_at,
)
from pipeline.inputs.dataset.splits import LoadedSplit
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.rollout.scoring import reward_inputs, score_one
from rewards.answers import Extraction, answer_key, find_answer, same_answer
from rewards.base import Outcome, RewardInput, Tags
from rewards.format import is_well_formed

Score = Callable[[Sequence[RewardInput]], Awaitable[list[dict[str, Outcome]]]]
"""Returns for each input the outcome of each reward function, by name."""

_OF_REWARDS = ("rewards", "score", "errors")
"""Fields of an answer that only reward metrics have."""


@dataclass(frozen=True)
class Answer:
    """One sample of one item of an evaluation.

    Attributes:
        prompt_id: id of the prompt.
        sample: number of the sample, from 0.
        text: `prompt.answer_prefix` and the completion.
        answer: the reference answer; None if the dataset has none.
        found: the answer in the text; None: there is none, or no reference answer.
        correct: whether `found` equals `answer`; None without a reference answer.
        well_formed: whether the text has the requested format and ended before the token limit.
        stop_reason: why sampling ended.
        num_tokens: number of sampled tokens.
        rewards: of a reward metric: the parts, as in `Rollout.rewards`.
        score: of a reward metric: its value; None: excluded, by an error or because the metric
            does not apply.
        errors: of a reward metric: why parts failed, by name.
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


@dataclass(frozen=True)
class Evaluation:
    """The answers to a split: in the order of its prompts, the same number of samples of each.

    Attributes:
        answers: prompt by prompt.
        metric: what is measured, a value of `eval.metric`.
    """

    answers: tuple[Answer, ...]
    metric: str = EXACT_ANSWER

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]], *, metric: str = EXACT_ANSWER) -> Evaluation:
        """Reads the result of `rows`."""
        return Evaluation(tuple(Answer(**row) for row in rows), metric)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The answers as JSON objects, one for each sample."""
        unused = _OF_REWARDS if self._is_exact else ()
        rows = [asdict(answer) for answer in self.answers]
        return [{key: row[key] for key in row if key not in unused} for row in rows]

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return max(answer.sample for answer in self.answers) + 1

    @property
    def has_references(self) -> bool:
        """Whether each prompt has a reference answer, so that answers are right or wrong."""
        return all(answer.correct is not None for answer in self.answers)

    @property
    def correct(self) -> np.ndarray:
        """Which answers are right, bool `prompts samples`; needs reference answers."""
        assert self.has_references
        return self._array([answer.correct for answer in self.answers], bool)

    @property
    def well_formed(self) -> np.ndarray:
        """Which completions have the requested format, bool `prompts samples`."""
        return self._array([answer.well_formed for answer in self.answers], bool)

    @property
    def scores(self) -> np.ndarray:
        """Values of a reward metric, float `prompts samples`; NaN where there is none."""
        return self._array([answer.score for answer in self.answers], float)

    @property
    def errors(self) -> dict[str, list[str]]:
        """Why parts of the reward failed, answer by answer, by part."""
        found: dict[str, list[str]] = {}
        for answer in self.answers:
            for name, error in answer.errors.items():
                found.setdefault(name, []).append(error)
        return found

    @property
    def accuracy(self) -> Accuracy:
        """Share of right answers."""
        return measure_accuracy(self.correct)

    @property
    def mean(self) -> float | None:
        """Mean of the metric; None if no answer has a value."""
        return self.accuracy.accuracy if self._is_exact else mean_score(self.scores)

    def first(self, prompts: int) -> Evaluation:
        """The answers to the first `prompts` prompts."""
        return Evaluation(self.answers[: prompts * self.samples], self.metric)

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
        """The metric's mean with its interval, and shares of completions by format and ending.

        `format_only` is the share of completions with the requested format and a wrong answer,
        `unanswered` that without any answer, `truncated` that cut off at `rollout.max_new_tokens`.
        With several samples per prompt also `pass@k` and `majority@k`, k = 1, 2, 4, ... and all.
        All that depends on right and wrong needs reference answers.

        With a reward metric `score`, `n` and `ci95` are those of the prompts that have a score, out
        of `prompts`; `excluded` is the share of answers without one, `correct` the share of right
        answers, and `reward/NAME` the mean of each part where it has a value.
        """
        references = self.has_references
        return {
            "metric": self.metric,
            **(asdict(self.accuracy) if self._is_exact else self._score_facts()),
            "samples": self.samples,
            "well_formed": float(self.well_formed.mean()),
            **(self._reference_facts() if references else {}),
            "truncated": _share([answer.stop_reason == "length" for answer in self.answers]),
            "num_tokens_mean": float(np.mean([answer.num_tokens for answer in self.answers])),
            **(self._by_votes(self.correct) if references else {}),
        }

    def _score_facts(self) -> dict[str, Any]:
        parts = dict.fromkeys(name for answer in self.answers for name in answer.rewards)
        values = {
            name: [one for a in self.answers if (one := a.rewards.get(name)) is not None]
            for name in parts
        }
        return {
            **asdict(measure_scores(self.scores)),
            "prompts": len(self.answers) // self.samples,
            "excluded": _share([answer.score is None for answer in self.answers]),
            **{f"reward/{name}": float(np.mean(own)) for name, own in values.items() if own},
        }

    def _reference_facts(self) -> dict[str, float | None]:
        correct, formed = self.correct, self.well_formed
        among = float(correct[formed].mean()) if formed.any() else None
        share: dict[str, float | None] = (
            {"accuracy_among_well_formed": among}
            if self._is_exact
            else {"correct": float(correct.mean())}
        )
        return {
            **share,
            "format_only": float((formed & ~correct).mean()),
            "unanswered": _share([answer.found is None for answer in self.answers]),
        }

    @property
    def _is_exact(self) -> bool:
        return self.metric == EXACT_ANSWER

    def _by_votes(self, correct: np.ndarray) -> dict[str, float]:
        if self.samples == 1:
            return {}
        sizes = sample_counts(self.samples)
        passes = {f"pass@{k}": pass_at(correct, k) for k in sizes}
        return passes | {f"majority@{k}": self.majority_at(k) for k in sizes}

    def _by_prompt(self) -> list[tuple[Answer, ...]]:
        starts = range(0, len(self.answers), self.samples)
        return [self.answers[start : start + self.samples] for start in starts]

    def _array(self, values: Sequence[float | None], dtype: type) -> np.ndarray:
        return np.array(values, dtype=dtype).reshape(-1, self.samples)


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


async def evaluate(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    config: Config,
    maker: PromptMaker,
    score: Score | None,
) -> Evaluation:
    """Judges the completions of `requests(prompts)` by the protocol of the configuration.

    Args:
        prompts: of one split.
        completions: in the order of the requests.
        config: the protocol, and the rewards of a reward metric.
        maker: makes prompts as the run does.
        score: calls the reward functions; only reward metrics need it.

    Raises:
        ValueError: if they are completions of other requests.
    """
    tags, scored = Tags.of(config.prompt), list[Rollout]()
    if config.eval.uses_rewards:
        assert score is not None
        by_id = {prompt.id: prompt for prompt in prompts}
        inputs = reward_inputs(completions, by_id, maker=maker, tags=tags)
        outcomes = await score(inputs)
        scored = [
            score_one(completion, one, parts, config)
            for completion, one, parts in zip(completions, inputs, outcomes, strict=True)
        ]
    return judge(
        prompts,
        completions,
        maker=maker,
        tags=tags,
        extraction=config.eval.extraction,
        metric=config.eval.metric,
        scored=scored,
    )


def judge(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    maker: PromptMaker,
    tags: Tags,
    extraction: Extraction = "tags",
    metric: str = EXACT_ANSWER,
    scored: Sequence[Rollout] = (),
) -> Evaluation:
    """Judges the completions of `requests(prompts)`.

    Args:
        prompts: of one split.
        completions: in the order of the requests.
        maker: makes prompts as the run does.
        tags: around the answers.
        extraction: how an answer is found.
        metric: a value of `eval.metric`.
        scored: of a reward metric: the completions with their rewards.

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
    scores: Sequence[Rollout | None]
    scores = scored if metric != EXACT_ANSWER else [None] * len(completions)
    answers = []
    for (prompt, sample), completion, one in zip(requested, completions, scores, strict=True):
        text, reference = maker.text_of(completion), prompt.answer
        found = correct = None
        if reference is not None:
            found = find_answer(text, tags=tags, extraction=extraction)
            correct = found is not None and same_answer(found, reference)
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
                **({} if one is None else _scores(one, metric)),
            )
        )
    return Evaluation(tuple(answers), metric)


def _scores(rollout: Rollout, metric: str) -> dict[str, Any]:
    """The fields of an answer that only reward metrics have."""
    return {
        "rewards": rollout.rewards,
        "score": rollout.reward if metric == WEIGHTED_SUM else rollout.rewards[metric],
        "errors": {
            name: f"{error.cause}: {error.message}" for name, error in rollout.errors.items()
        },
    }


def compare(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Both summaries and the change between them, as in `summary.json` under `eval`.

    With a reward metric the change is that of the prompts that have a score in both, `paired_n` of
    them; without such prompts difference, interval and p-value are None.
    """
    summaries = {"before": before.summary(), "after": after.summary()}
    if before.metric == EXACT_ANSWER:
        change = compare_paired(before.correct, after.correct)
        return {**summaries, **_change_facts(change)}
    scored = compare_scores(before.scores, after.scores)
    return {**summaries, **_change_facts(scored), "paired_n": scored.n}


def check_references(config: Config, splits: Mapping[str, LoadedSplit | None]) -> None:
    """Refuses the metric `exact_answer` for prompts without reference answers.

    Args:
        config: of the run.
        splits: the splits to evaluate, by setting.

    Raises:
        ValueError: with a line for each such split.
    """
    if config.eval.uses_rewards:
        return
    parts = ", ".join(part.name for part in config.rewards.functions)
    mistakes = []
    for name, split in splits.items():
        missing = sum(prompt.answer is None for prompt in split.prompts) if split else 0
        if split and missing:
            whole = missing == len(split.prompts)
            rows = "its rows have" if whole else f"{missing} of its {len(split.prompts)} rows have"
            mistakes.append(
                f"{name}: {rows} no reference answer in column {config.data.answer_column!r}, and "
                f'eval.metric = "{EXACT_ANSWER}" compares with it; set data.answer_column, or '
                f'eval.metric to "{WEIGHTED_SUM}" or the name of a reward part: {parts}'
            )
    if mistakes:
        raise ValueError("\n".join(mistakes))


def _change_facts(change: PairedChange | ScoreChange) -> dict[str, Any]:
    return {
        "paired_difference": change.difference,
        "paired_ci95": None if change.ci95 is None else list(change.ci95),
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
    return bool(votes) and bool(max(votes.values(), key=len)[0].correct)


def _share(flags: Sequence[bool]) -> float:
    return float(np.mean(flags))
