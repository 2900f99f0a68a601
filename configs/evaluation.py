"""Settings of evaluations: the protocol, and the metric that selects the best version."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated

from pydantic import Field

from configs.base import ACCEPTED, Problem, Table, Text
from configs.rollout import Rollout
from configs.task import (
    ACCURACY_REWARDS,
    CORRECTNESS_REWARDS,
    OVERLONG,
    AnswerPlace,
    NamedSource,
    Rewards,
    repeated_names,
)

EXACT_ANSWER, WEIGHTED_SUM = "exact_answer", "reward"
"""Values of `eval.metric` besides the names of reward parts."""


_LEAST_TEMPERATURE = 0.01
"""Scores divided by less can overflow."""


class Eval(Table):
    """The evaluation protocol, equal for the base and the tuned model."""

    metric: Text | None = Field(
        None,
        description="what is measured, and selects the best version. exact_answer: share of "
        "answers that equal the reference answer, without the reward functions; reward: the "
        "weighted sum of the rewards; or the name of a reward part. Default: the first part whose "
        "function is a correctness reward of the library; without one, or with eval.extraction, "
        "exact_answer; reward if the data have no reference answers",
    )
    temperature: float = Field(
        0.0, ge=0, le=100, description="sampling temperature; 0: greedy decoding"
    )
    samples: int = Field(
        1, ge=1, description="completions for each prompt, for pass@k and majority@k"
    )
    extraction: AnswerPlace | None = Field(
        None,
        description="where the answer is in evaluations with metric = exact_answer, if not as "
        "prompt.answer says; e.g. last_number, as in many published GSM8K results",
    )
    every_steps: int = Field(
        0,
        ge=0,
        description="steps between two validations; 0: no validation by steps",
        json_schema_extra=ACCEPTED,
    )
    every_minutes: float | None = Field(
        None,
        gt=0,
        description="minutes between two validations; excludes every_steps",
        json_schema_extra=ACCEPTED,
    )
    sets: Annotated[tuple[NamedSource, ...], Field(strict=False)] = Field(
        (),
        description="further test sets, evaluated once before and once after training, e.g. to "
        "measure forgetting",
    )

    def conflicts(self) -> Iterator[Problem]:
        """Answers can differ, one interval is set, the sets have different names."""
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            yield "temperature", f"must be 0, or at least {_LEAST_TEMPERATURE}"
        if self.samples > 1 and self.temperature == 0:
            what = "needs eval.temperature above 0: greedy answers are equal; nearest valid: 1"
            yield "samples", what
        if self.every_steps and self.every_minutes is not None:
            what = "excludes eval.every_steps; remove one, e.g. with --eval.every_steps 0"
            yield "every_minutes", what
        reserved = ("train", "validation", "test", "probe")
        yield from repeated_names("sets", [*reserved, *(source.name for source in self.sets)])

    @property
    def validates(self) -> bool:
        """Whether the validation split is evaluated during training."""
        return bool(self.every_steps) or self.every_minutes is not None


def default_metric(evaluation: Eval, rewards: Rewards) -> str:
    """The metric if `eval.metric` is unset: the first correctness reward of the library.

    `EXACT_ANSWER` without one, with `eval.extraction`, or where both measure the same.
    """
    found = (part for part in rewards.functions if part.function in CORRECTNESS_REWARDS)
    part = next(found, None)
    if part is None or evaluation.extraction is not None:
        return EXACT_ANSWER
    is_exact = part.function == ACCURACY_REWARDS[0] and not part.args
    return EXACT_ANSWER if is_exact else part.name


def metric_names(rewards: Rewards, rollout: Rollout) -> list[str]:
    """The values that `eval.metric` can have."""
    overlong = [OVERLONG] if rollout.overlong_tokens else []
    return [EXACT_ANSWER, WEIGHTED_SUM, *(part.name for part in rewards.functions), *overlong]


def metric_problems(evaluation: Eval, rewards: Rewards, rollout: Rollout) -> Iterator[Problem]:
    """Yields a problem if `eval.metric` is none of `metric_names`, or ambiguous.

    Another one if the metric is a reward, which finds answers without `eval.extraction`.
    """
    for part in rewards.functions:
        if part.name in {EXACT_ANSWER, WEIGHTED_SUM}:
            what = f'"{part.name}" is a value of eval.metric of its own; name the part otherwise'
            yield "rewards.functions", what
    metric = evaluation.metric
    if metric is None:
        return
    names = metric_names(rewards, rollout)
    if metric not in names:
        (nearest,) = get_close_matches(metric, names, n=1, cutoff=0.0)
        what = f"is not the name of a reward part, {EXACT_ANSWER} or {WEIGHTED_SUM}"
        choices = ", ".join(names)
        yield "eval.metric", f'{what}; nearest valid: "{nearest}", of {choices}'
    elif evaluation.extraction is not None and metric != EXACT_ANSWER:
        yield "eval.extraction", unused_extraction(metric)


def unused_extraction(metric: str) -> str:
    """Why `eval.extraction` is refused with a reward as metric, and what to set instead."""
    return (
        f'has no effect with eval.metric = "{metric}", a reward, which finds answers itself; set '
        f"prompt.answer instead, or measure without rewards by --eval.metric {EXACT_ANSWER}"
    )
