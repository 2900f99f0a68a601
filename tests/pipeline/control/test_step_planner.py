"""The plan of a run with a time budget, and the learning rate that follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from pipeline.control.step_planner import StepPlan, StepPlanner, plans_in_force
from tests.fakes import make_config

LR = 0.5


def config(schedule: str = "linear", *, warmup: int = 0, **tables: Any) -> Config:
    return make_config(
        Path("nowhere"),
        budget={"steps": None, "time": "1h"},
        learner={"schedule": schedule, "lr": LR, "warmup_steps": warmup},
        **tables,
    )


def plan_steps(
    planner: StepPlanner, lefts: Sequence[int], *, first: int = 0, skip: int = 0
) -> tuple[list[float], list[dict[str, Any]]]:
    """Rates and journaled plans of steps, given the steps left at each step."""
    rates, journal = [], []
    for step, left in enumerate(lefts, start=first):
        new = planner.decide(step, steps_left=left, prompts=2)
        journal += [asdict(new)] if new else []
        rates.append(planner.rate if step >= skip else 0.0)
    return rates, journal


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_with_a_constant_plan_the_rate_follows_the_configured_schedule(schedule: str, warmup: int):
    planner = StepPlanner(config(schedule, warmup=warmup), entries=(), step=0)
    rates, journal = plan_steps(planner, range(10, 0, -1))
    done = [step / (10 - warmup) for step in range(10 - warmup)]
    shape = {"linear": lambda x: 1 - x, "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x))}
    expected = [LR * (n + 1) / warmup for n in range(warmup)]
    expected += [LR * shape[schedule](share) for share in done]
    assert rates == pytest.approx(expected)
    assert journal == [{"step": 0, "total_steps": 10, "prompts": 2}]


def test_a_changed_plan_is_journaled_and_the_decay_ends_with_it():
    lefts = [10, 9, 8, 3, 2, 1]
    rates, journal = plan_steps(StepPlanner(config(), entries=(), step=0), lefts)
    assert [(entry["step"], entry["total_steps"]) for entry in journal] == [(0, 10), (3, 6)]
    # Of the 0.8 at step 2 three quarters remain before the last three steps, and so on.
    assert rates == pytest.approx([LR * share for share in (1, 0.9, 0.8, 0.6, 0.4, 0.2)])


def test_small_changes_of_the_remaining_steps_keep_the_plan():
    _, journal = plan_steps(StepPlanner(config(), entries=(), step=0), [100, 95, 105, 92, 105])
    assert [entry["total_steps"] for entry in journal] == [100]
    _, journal = plan_steps(StepPlanner(config(), entries=(), step=0), [5, 5, 5])
    assert [entry["total_steps"] for entry in journal] == [5, 6, 7]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=40), st.data())
def test_invariant_7_a_resume_replays_the_decisions_bit_for_bit(
    lefts: list[int], data: st.DataObject
):
    rates, journal = plan_steps(StepPlanner(config("cosine", warmup=1), entries=(), step=0), lefts)
    resumed = data.draw(st.integers(0, len(lefts)))
    planner = StepPlanner(config("cosine", warmup=1), entries=journal, step=resumed)
    last = max((entry["step"] for entry in journal), default=-1)
    # Up to the last earlier decision the clock has no influence.
    again = [7] * max(0, last + 1 - resumed)
    assert plan_steps(planner, again, first=resumed) == (rates[resumed : last + 1], [])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_the_rate_never_rises_and_is_never_zero(lefts: list[int]):
    rates, _ = plan_steps(StepPlanner(config(), entries=(), step=0), lefts)
    assert all(rate > 0 for rate in rates)
    assert rates == sorted(rates, reverse=True)


def test_the_sft_phase_is_not_part_of_the_decay():
    warm = config(
        run={"phases": ["sft", "grpo"]},
        sft={"steps": 4, "train": {"path": "sft.jsonl"}},
    )
    planner = StepPlanner(warm, entries=(), step=0)
    rates, _ = plan_steps(planner, range(8, 0, -1), skip=4)
    assert rates[4:] == pytest.approx([LR, 0.75 * LR, 0.5 * LR, 0.25 * LR])


def test_a_smaller_step_is_a_decision_of_its_own():
    planner = StepPlanner(config(), entries=(), step=0)
    first = planner.decide(0, steps_left=2, prompts=2)
    assert first == StepPlan(0, 2, 2)
    assert planner.decide(1, steps_left=1, prompts=1) == StepPlan(1, 2, 1)
    assert planner.prompts == 1


def test_a_replayed_step_is_smaller_if_less_time_is_left():
    entries = [asdict(StepPlan(0, 5, 2)), asdict(StepPlan(3, 4, 2))]
    planner = StepPlanner(config(), entries=entries, step=1)
    assert planner.decide(1, steps_left=1, prompts=2) is None
    assert planner.decide(2, steps_left=1, prompts=1) == StepPlan(2, 5, 1)
    assert planner.decide(3, steps_left=1, prompts=2) is None
    assert planner.plan == StepPlan(3, 4, 2)


@pytest.mark.parametrize("event", ["budget", "extended"])
def test_repeated_steps_are_planned_for_a_changed_budget(event: str):
    def planned(step: int, total: int) -> dict[str, Any]:
        return {"event": "planned", **asdict(StepPlan(step, total, 2))}

    journal = [
        planned(0, 20),
        {"event": "checkpoint", "step": 3},
        planned(3, 21),
        planned(6, 25),
        {"event": event, "step": 4},
        planned(5, 8),
    ]
    assert plans_in_force(journal[:4]) == [journal[0], journal[2], journal[3]]
    assert plans_in_force(journal[:5]) == [journal[0], journal[2]]
    assert plans_in_force(journal) == [journal[0], journal[2], journal[5]]
    planner = StepPlanner(config(), entries=plans_in_force(journal[:5]), step=4)
    rates, decided = plan_steps(planner, [3, 2, 1], first=4)
    assert [(entry["step"], entry["total_steps"]) for entry in decided] == [(4, 7)]
    # The rate is 18/20 at step 2 and 18/19 of that at step 3; it decays to 0 over the steps left.
    at_3 = 18 / 20 * 18 / 19 * LR
    assert rates == pytest.approx([at_3 * share for share in (3 / 4, 2 / 4, 1 / 4)])
