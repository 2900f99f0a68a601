"""The plan of a run with a budget of time: how many steps there will be, how large the next one is.

The plan follows measured time, and the learning rate's decay follows the plan, so that it is done
when the time is. Each change is a decision in the journal (`planned`). A resume replays what is
there, so what it does again is bit for bit what was done; it decides anew only after that, or where
the run is given another budget than the one that those decisions were for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import Config

MOVED = 0.1
"""Share of the steps to come by which their number must move to be planned anew."""


@dataclass(frozen=True)
class Plan:
    """A decision.

    Attributes:
        step: before which step it was taken; in force from there on.
        total_steps: steps that the run will have.
        prompts: of this step.
    """

    step: int
    total_steps: int
    prompts: int


def plans_in_force(journal: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `planned` events that are to be replayed, oldest first.

    With a `budget` or `extended` event there is another budget from its `step` on: what was planned
    from there on is void.
    """
    plans: list[Mapping[str, Any]] = []
    for entry in journal:
        if entry["event"] == "planned":
            plans.append(entry)
        elif entry["event"] in {"budget", "extended"}:
            plans = [plan for plan in plans if plan["step"] < entry["step"]]
    return plans


class StepPlanner:
    """The plan in force, step by step.

    Args:
        config: of the run.
        entries: what `plans_in_force` found.
        step: where the run goes on.
    """

    def __init__(self, config: Config, *, entries: Iterable[Mapping[str, Any]], step: int) -> None:
        self._settings = config.learner
        self._full = config.rollout.prompts_per_step
        self._decays_from = config.sft_steps + config.learner.warmup_steps
        self._begins = config.sft_steps
        self._replayed = {
            entry["step"]: Plan(entry["step"], entry["total_steps"], entry["prompts"])
            for entry in entries
        }
        self._last_replayed = max(self._replayed, default=-1)
        self.plan = Plan(0, 0, self._full)
        self._left = 1.0
        for done in range(step):
            self._enter(self._known(done))

    def decide(self, step: int, *, steps_left: int, prompts: int) -> Plan | None:
        """Enters `step`; returns the plan if this is a new decision, to be journaled.

        Args:
            step: the next one; all are entered, in order.
            steps_left: how many there are left, this one included, by the clock.
            prompts: how many it may have, by the clock.
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
        """Prompts of the step that was entered last."""
        return self.plan.prompts

    @property
    def rate(self) -> float:
        """Learning rate of the step that was entered last, one of the GRPO phase.

        A linear rise over the warm-up. Then, while the plan does not change, the values of
        `learner.schedule` for a decay over the planned steps; where it does, the decay goes on from
        where it is, faster or slower, and is done at the new end.
        """
        settings, step = self._settings, self.plan.step - self._begins
        if step < settings.warmup_steps:
            return settings.lr * (step + 1) / settings.warmup_steps
        if settings.schedule == "cosine":
            return settings.lr * 0.5 * (1 + math.cos(math.pi * (1 - self._left)))
        return settings.lr * self._left

    def _known(self, step: int) -> Plan:
        return replace(self._replayed.get(step, self.plan), step=step)

    def _enter(self, plan: Plan) -> None:
        if plan.step > self._decays_from:
            # Of n steps that are left with this one, and the one before, n are still to come: with
            # n falling by one each time the product is linear, and it never is 0 at a step.
            coming = max(plan.total_steps - plan.step, 1)
            self._left *= coming / (coming + 1)
        self.plan = plan
