"""Settings of evaluations: the protocol, and the metric that selects the best version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from configs.base import ACCEPTED, Problem, Table, Text
from configs.task import AnswerPlace, NamedSource, repeated_names

EXACT_ANSWER, WEIGHTED_SUM = "exact_answer", "reward"
"""Values of `eval.metric` besides the names of reward parts."""


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
        description="steps between two validations; 0: every_minutes, or without it a tenth of the "
        "budget (30 minutes with budget.until)",
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
        if 0 < self.temperature < 0.01:  # as in rollout.temperature
            yield "temperature", "must be 0, or at least 0.01; nearest valid: 0 or 0.01"
        if self.samples > 1 and self.temperature == 0:
            what = "needs eval.temperature above 0: greedy answers are equal; nearest valid: 1"
            yield "samples", what
        if self.every_steps and self.every_minutes is not None:
            what = "excludes eval.every_steps; remove one, e.g. with --eval.every_steps 0"
            yield "every_minutes", what
        reserved = ("train", "validation", "test", "probe")
        yield from repeated_names("sets", [*reserved, *(source.name for source in self.sets)])


def unused_extraction(metric: str) -> str:
    """Why `eval.extraction` is refused with a reward as metric, and what to set instead."""
    return (
        f'has no effect with eval.metric = "{metric}", a reward, which finds answers itself; set '
        f"prompt.answer instead, or measure without rewards by --eval.metric {EXACT_ANSWER}"
    )
