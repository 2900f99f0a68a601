"""Plans a run with a time budget: number of steps, size and learning rate of the next step.

The plan follows measured time, and the learning-rate decay follows the plan, so that both end
together. Each change is a decision in the journal (`planned`). A resumed run replays the journaled
decisions and decides anew only after them, or if the budget has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs.evaluation import Eval
from configs.schema import Config

MOVED = 0.1
"""Relative change of the remaining steps that causes a new plan."""


@dataclass(frozen=True)
class StepPlan:
    """A planning decision.

    Attributes:
        step: the first step that it applies to.
        total_steps: steps that the run will have.
        prompts: prompts of this step.
    """

    step: int
    total_steps: int
    prompts: int


def plans_in_force(journal: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `planned` entries to replay, oldest first.

    A `budget` or `extended` entry changes the budget from its `step` on and cancels the plans for
    these steps.
    """
    plans: list[Mapping[str, Any]] = []
    for entry in journal:
        if entry["event"] == "planned":
            plans.append(entry)
        elif entry["event"] in {"budget", "extended"}:
            plans = [plan for plan in plans if plan["step"] < entry["step"]]
    return plans


def validations_within(settings: Eval, step: int, steps: int, *, step_s: float) -> int:
    """Validations between `steps` steps of `step_s` seconds; the first is number `step`."""
    if settings.every_minutes is not None:
        # A validation is due after the step in which the interval ends.
        every = math.ceil(60 * settings.every_minutes / step_s) if step_s > 0 else steps
        return (steps - 1) // every
    if not settings.every_steps:
        return 0
    return (step + steps - 1) // settings.every_steps - step // settings.every_steps


class StepPlanner:
    """The plan in force, step by step.

    Args:
        config: of the run.
        entries: the result of `plans_in_force`.
        step: where the run continues.

    Attributes:
        settings: of the learner, whose `lr` may change.
    """

    def __init__(self, config: Config, *, entries: Iterable[Mapping[str, Any]], step: int) -> None:
        self.settings = config.learner
        self._full = config.rollout.prompts_per_step
        self._decays_from = config.sft_steps + config.learner.warmup_steps
        self._begins = config.sft_steps
        self._replayed = {
            entry["step"]: StepPlan(entry["step"], entry["total_steps"], entry["prompts"])
            for entry in entries
        }
        self._last_replayed = max(self._replayed, default=-1)
        self.plan = StepPlan(0, 0, self._full)
        self._left = 1.0
        for done in range(step):
            self._enter(self._known(done))

    def decide(self, step: int, *, steps_left: int, prompts: int) -> StepPlan | None:
        """Enters `step`; returns the plan if it is a new decision, to be journaled.

        Args:
            step: the next step; steps are entered in order.
            steps_left: steps that the clock leaves, this one included.
            prompts: prompts that the clock leaves time for.
        """
        plan = known = self._known(step)
        if step > self._last_replayed:
            coming = self.plan.total_steps - step
            if abs(steps_left - coming) > max(MOVED * coming, 0.5):
                plan = replace(plan, total_steps=step + steps_left)
        if step > self._last_replayed or prompts < plan.prompts:
            plan = replace(plan, prompts=prompts)
        self._enter(plan)
        return None if plan == known else plan

    @property
    def prompts(self) -> int:
        """Prompts of the current step."""
        return self.plan.prompts

    @property
    def rate(self) -> float:
        """Learning rate of the current step of the GRPO phase.

        A linear warm-up, then the decay. While the plan does not change, the values are those of
        `learner.schedule` for a decay over the planned steps. After a change the decay continues
        from its current value, faster or slower, and ends at the new end.
        """
        settings, step = self.settings, self.plan.step - self._begins
        if step < settings.warmup_steps:
            return settings.lr * (step + 1) / settings.warmup_steps
        if settings.schedule == "cosine":
            return settings.lr * 0.5 * (1 + math.cos(math.pi * (1 - self._left)))
        return settings.lr * self._left

    def _known(self, step: int) -> StepPlan:
        return replace(self._replayed.get(step, self.plan), step=step)

    def _enter(self, plan: StepPlan) -> None:
        if plan.step > self._decays_from:
            # With n steps left, this one included, the factor is n / (n + 1): with n falling by one
            # at each step the product is linear and never reaches 0 at a step.
            coming = max(plan.total_steps - plan.step, 1)
            self._left *= coming / (coming + 1)
        self.plan = plan
