"""Estimated seconds, and whether another step fits into the time left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.deadline import (
    BETWEEN_STEPS,
    EXIT,
    EXPORT,
    UPDATE,
    VALIDATION,
    Deadline,
    PartTimes,
    evaluation_part,
    least_run_s,
    step_part,
)
from tests.samples import make_config

TEST, STEP = evaluation_part("test"), step_part("grpo")


def time_budget(
    folder: Path,
    *,
    time_s: float = 1000.0,
    step_s: float = 100.0,
    restart_s: float = 0.0,
    **tables: Any,
) -> Deadline:
    """Four prompts a step; validation 20 s, tests 50 s, export 30 s, exit 5 s."""
    given: dict[str, Any] = {
        "rollout": {"prompts_per_step": 4},
        "data": {"validation": {"path": "validation.jsonl"}},
        "budget": {"steps": None, "time": f"{time_s:.0f}s"},
        "eval": {"every_steps": 1000},
    }
    parts = {VALIDATION: 20.0, EXPORT: 30.0, EXIT: 5.0, TEST: 50.0, STEP: step_s}
    return Deadline(
        make_config(folder, **(given | tables)),
        None,
        time_s,
        parts=PartTimes(parts),
        restart_s=restart_s,
    )


def test_a_budget_of_steps_counts_steps(tmp_path: Path):
    deadline = Deadline(make_config(tmp_path), steps=3, time_s=None)
    deadline.parts.observe(STEP, 1e9)
    found = [deadline.allows_step(step, 0.0) for step in range(5)]
    assert found == [True, True, True, False, False]
    assert deadline.leaving_an_update(2) is None
    assert deadline.test_share(0.0, deadline.during_test(exported=True)) == 1.0


@pytest.mark.parametrize("restart_s", [0.0, 40.0])
@pytest.mark.parametrize(("left_s", "allowed"), [(205.1, True), (204.9, False)])
def test_a_step_starts_if_step_end_and_a_restart_fit(
    tmp_path: Path, left_s: float, allowed: bool, restart_s: float
):
    # Validation, tests, export and exit take 105 s.
    deadline = time_budget(tmp_path, restart_s=restart_s)
    assert deadline.allows_step(7, 1000 - left_s - restart_s) is allowed


def test_a_step_has_as_many_prompts_as_fit(tmp_path: Path):
    deadline = time_budget(tmp_path, rollout={"prompts_per_step": 4, "min_prompts_per_step": 2})
    # The end takes 105 s, a step 20 s and 20 s per prompt. A shortened step is measured.
    deadline.observe(
        {
            "step": 1,
            "rollout/prompts_planned": 2.0,
            "time/step_s": 60.0,
            "time/learn_s": 30.0,
            "time/elapsed_s": 60.0,
        }
    )
    for left_s, prompts in [(205.1, 4), (204.9, 3), (165.1, 2), (164.9, 0)]:
        assert deadline.prompts_that_fit(7, 1000 - left_s) == prompts, left_s
    # Sampling leaves an update of 30 s, or of 50 s with all prompts, and the end.
    assert [deadline.leaving_an_update(prompts) for prompts in (2, 4)] == [865, 845]


def test_times_of_earlier_processes_are_recalled(tmp_path: Path):
    found = time_budget(
        tmp_path,
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 1},
    )
    rows = [
        {"step": step, "time/step_s": 40.0, "time/learn_s": 16.0, "time/elapsed_s": 100.0 + step}
        for step in (1, 2)
    ]
    saved = {"event": "checkpoint", "step": 2, "seconds": 3.0}
    found.recall(rows, [{"event": "reserved", "reason": EXPORT, "seconds": 7.0}, saved])
    assert found.parts.measured == {
        step_part("sft"): [40.0],
        STEP: [40.0],
        UPDATE: [16.0],
        EXPORT: [7.0],
        "checkpoint": [3.0],
    }


def test_the_first_step_is_estimated_from_the_evaluation_before_training(tmp_path: Path):
    deadline = time_budget(tmp_path)
    # 8 rollouts a step, 40 answers in 50 s: 10 s of sampling, as many for the update.
    deadline.estimate_step(answers=40)
    assert deadline.parts.expected_s(STEP) == 20.0
    assert deadline.parts.expected_s(UPDATE) == 10.0


def test_planned_steps_count_the_time_between_steps(tmp_path: Path):
    deadline = time_budget(tmp_path, time_s=1e5)
    assert deadline.steps_planned(7, 0.0) == 7 + (1e5 - 105) // 100
    for seconds in (10.0, 40.0):
        deadline.parts.observe(BETWEEN_STEPS, seconds)
    assert deadline.steps_planned(0, 0.0) == (1e5 - 105 + 25) // 125


def test_a_slow_sampling_uses_the_time_of_a_restart(tmp_path: Path):
    deadline = time_budget(tmp_path, restart_s=600.0)
    # An update, and validation, export, exit and tests, 105 s.
    deadline.parts.observe(UPDATE, 30.0)
    assert deadline.leaving_an_update(4) == 1000 - 135


@pytest.mark.parametrize(("left_s", "share"), [(65.1, 1.0), (60.0, 0.9999), (30.0, 0.5), (-3.0, 0)])
def test_the_final_evaluation_is_shortened_to_the_time_left(
    tmp_path: Path, left_s: float, share: float
):
    deadline = time_budget(tmp_path)
    found = deadline.test_share(1000 - left_s, deadline.during_test(exported=True))
    assert found == pytest.approx(share)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_warms_up_and_decays_with_the_time_used(tmp_path: Path, schedule: str):
    settings = {"schedule": schedule, "lr": 1.0, "warmup_steps": 2}
    deadline = time_budget(tmp_path, step_s=10.0, learner=settings)
    # Training begins at 95 s and ends at 1000 - 105 s.
    assert [deadline.rate(step, 95.0) for step in range(3)] == [0.5, 1.0, 1.0]
    assert deadline.rate(40, 495.0) == pytest.approx(0.5)
    last = deadline.rate(79, 890.0)
    assert last is not None
    assert 0 < last < 0.02


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], 7.0),
        ([4.0, 6.0], 6.0),
        ([4.0, 6.0, 5.0], 5.0),
        ([4.0, 4.0, 4.0, 400.0], 4.0),  # a single stall
        ([1.0, 1.0, 1.0, 2.0, 2.0], 2.0),
    ],
)
def test_a_part_is_expected_to_take_as_long_as_the_last_times(
    seconds: list[float], expected: float
):
    parts = PartTimes({EXPORT: 7.0}, {EXPORT: seconds} if seconds else {})
    assert parts.expected_s(EXPORT) == expected


@pytest.mark.parametrize(
    ("trend", "drift"),
    [
        ({}, 1.0),
        ({VALIDATION: [4.0, 5.0, 6.0, 6.0]}, 1.5),
        ({STEP: [2.0, 30.0, 3.0, 3.0, 6.0, 6.0]}, 2.0),  # the second one stalled
        ({VALIDATION: [4.0, 2.0, 2.0], STEP: [1.0, 9.0]}, 0.5),
    ],
)
def test_longer_answers_lengthen_the_final_evaluations(
    tmp_path: Path, trend: dict[str, list[float]], drift: float
):
    deadline = time_budget(tmp_path)
    tests = {TEST: [10.0], evaluation_part("boolq"): [2.0], EXPORT: [9.0]}
    deadline.parts.measured = {**tests, **trend}
    assert deadline.tests_s == pytest.approx(12.0 * drift)


def test_minimum_run_time_by_hand():
    assert least_run_s(0) == 20.0
    assert least_run_s(2_000_000_000) == 25.0
