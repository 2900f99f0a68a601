"""Used time, estimated seconds, and whether another step fits into the time left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.clock import Clock
from pipeline.deadline import (
    EXIT,
    EXPORT,
    SAFETY,
    VALIDATION,
    Deadline,
    PartTimes,
    StepTimes,
    evaluation_part,
    least_run_s,
)
from tests.run_process import FakeClock
from tests.samples import make_config


def test_elapsed_time_includes_earlier_processes():
    now = FakeClock()
    now.seconds = 107.0
    assert Clock(started=100.0, used_before_s=50.0, now=now).elapsed_s == 57.0
    assert Clock(started=100.0).now is time.monotonic


def test_waiting_for_devices_stops_the_clock():
    now = FakeClock()
    clock = Clock(started=0.0, used_before_s=50.0, now=now)
    for seconds in (10.0, 30.0):
        now.seconds += 1.0
        before_s = clock.elapsed_s
        with clock.waiting():
            now.seconds += seconds
            assert clock.elapsed_s == before_s
    assert clock.waited_s == 40.0
    assert clock.elapsed_s == 52.0


def test_a_budget_of_steps_counts_steps(tmp_path: Path):
    deadline = Deadline(make_config(tmp_path), steps=3, time_s=None)
    deadline.step_times.observe(1e9)
    found = [deadline.allows_step(step, 0.0) for step in range(5)]
    assert found == [True, True, True, False, False]
    assert deadline.leaving(5.0) is None
    assert time_budget(tmp_path).leaving(60.0) == 940.0
    assert deadline.test_share(0.0, deadline.during_test(exported=True)) == 1.0


def time_budget(
    folder: Path,
    *,
    time_s: float = 1000.0,
    step_s: float = 100.0,
    restart_s: float = 0.0,
    **tables: Any,
) -> Deadline:
    """Four prompts a step; validation 20 s, tests 50 s, export 30 s, exit 5 s."""
    rollout = {"prompts_per_step": 4, **tables.pop("rollout", {})}
    given: dict[str, Any] = {
        "data": {"validation": {"path": "validation.jsonl"}},
        "budget": {"steps": None, "time": f"{time_s:.0f}s"},
        "eval": {"every_steps": 1000},
    }
    config = make_config(folder, rollout=rollout, **(given | tables))
    parts = {VALIDATION: 20.0, EXPORT: 30.0, EXIT: 5.0, evaluation_part("test"): 50.0}
    deadline = Deadline(config, None, time_s, parts=PartTimes(parts), restart_s=restart_s)
    deadline.step_times.observe(step_s)
    return deadline


@pytest.mark.parametrize("restart_s", [0.0, 40.0])
@pytest.mark.parametrize(("left_s", "allowed"), [(205.1, True), (204.9, False)])
def test_a_step_starts_if_step_end_and_a_restart_fit(
    tmp_path: Path, left_s: float, allowed: bool, restart_s: float
):
    # A step with its validation takes 12% of the budget, more than may stay idle: no slack.
    deadline = time_budget(tmp_path, restart_s=restart_s)
    assert deadline.allows_step(7, 1000 - left_s - restart_s) is allowed


@pytest.mark.parametrize("spare_s", [-0.1, 0.1])
def test_slack_is_kept_if_steps_are_short(tmp_path: Path, spare_s: float):
    # Slack is 20% of the measured end plus 1% of the budget: 0.2 * 100 + 100, but at most 2% of the
    # budget less a step and its validation: 200 - 30, or 0.
    needed_s = 10 + 105 + (SAFETY - 1) * 100 + 100
    deadline = time_budget(tmp_path, time_s=10_000.0, step_s=10.0)
    assert deadline.allows_step(7, 10_000 - needed_s - spare_s) is (spare_s > 0)
    deadline = time_budget(tmp_path, step_s=5.0)
    assert deadline.allows_step(7, 1000 - 5 - 105 - spare_s) is (spare_s > 0)


def test_a_step_has_as_many_prompts_as_fit(tmp_path: Path):
    # The end takes 105 s, a step 20 s and 20 s per prompt.
    deadline = time_budget(tmp_path, rollout={"min_prompts_per_step": 1})
    for left_s, size in [(205.1, 4), (190, 3), (170, 2), (164, 1), (145.1, 1), (144.9, 0)]:
        assert deadline.prompts_that_fit(7, 1000 - left_s) == size, left_s
    deadline = time_budget(tmp_path, rollout={"min_prompts_per_step": 3})
    assert deadline.prompts_that_fit(7, 1000 - 170) == 0


@pytest.mark.parametrize(("left_s", "fits"), [(205.1, 4), (204.9, 0)])
def test_an_sft_step_has_one_size(tmp_path: Path, left_s: float, fits: int):
    deadline = time_budget(
        tmp_path,
        rollout={"min_prompts_per_step": 1},
        run={"name": "run", "phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 2},
    )
    deadline.step_times.observe(100.0, phase="sft")
    assert deadline.prompts_that_fit(1, 1000 - left_s) == fits


def test_step_times_of_earlier_processes_are_recalled(tmp_path: Path):
    rows = [
        {"step": step, "time/step_s": 40.0, "time/learn_s": 16.0, "time/elapsed_s": 100.0 + step}
        for step in (1, 2)
    ]
    saved = {"event": "checkpoint", "step": 2, "seconds": 3.0}
    found = time_budget(tmp_path)
    found.recall(rows, [{"event": "reserved", "reason": EXPORT, "seconds": 7.0}, saved])
    assert found.step_times.expected_s() == pytest.approx(40.0)
    assert found.update_times.expected_s() == pytest.approx(16.0)
    assert found.parts.measured == {EXPORT: [7.0], "checkpoint": [3.0]}


def test_planned_steps_count_time_between_steps_and_validations(tmp_path: Path):
    deadline = time_budget(tmp_path, time_s=1e5)
    slack_s = (SAFETY - 1) * 100 + 1000
    assert deadline.steps_planned(7, 0.0) == 7 + (1e5 - 105 - slack_s) // 100
    deadline.step_times.observe_between(25.0)
    assert deadline.steps_planned(0, 0.0) == (1e5 - 105 - slack_s + 25) // 125
    # Validations of 20 s each: 2 s a step, or 20 s of 620 s.
    deadline = time_budget(tmp_path, time_s=1e5, eval={"every_steps": 10})
    assert deadline.steps_planned(0, 0.0) == (1e5 - 105 - slack_s + 2) // 102
    deadline = time_budget(tmp_path, time_s=1e5, eval={"every_minutes": 10})
    assert deadline.steps_planned(0, 0.0) == (1e5 - 105 - slack_s) * (600 / 620) // 100


def test_an_update_needs_time_for_its_export(tmp_path: Path):
    # The update is assumed to take 1.5 * 100 s; validation, export and exit 55 s; tests can shrink.
    deadline = time_budget(tmp_path)
    assert not deadline.allows_update(4, sampled_s=100.0, now_s=1000 - 204.9)
    assert deadline.allows_update(4, sampled_s=100.0, now_s=1000 - 205.1)
    deadline.update_times.observe(140.0)
    assert deadline.allows_update(4, sampled_s=100.0, now_s=1000 - 195.1)


@pytest.mark.parametrize(("left_s", "share"), [(65.1, 1.0), (60.0, 0.9999), (30.0, 0.5), (-3.0, 0)])
def test_the_final_evaluation_is_shortened_to_the_time_left(
    tmp_path: Path, left_s: float, share: float
):
    deadline = time_budget(tmp_path)
    found = deadline.test_share(1000 - left_s, deadline.during_test(exported=True))
    assert found == pytest.approx(share)


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.5), ("cosine", 0.5)])
def test_the_learning_rate_decays_with_the_time_used(tmp_path: Path, schedule: str, middle: float):
    deadline = time_budget(
        tmp_path, step_s=10.0, learner={"schedule": schedule, "lr": 1.0, "warmup_steps": 0}
    )
    # Training begins at 95 s and ends at 1000 - 105 s.
    assert deadline.rate(0, 95.0) == 1.0
    assert deadline.rate(40, 495.0) == pytest.approx(middle)
    last = deadline.rate(79, 890.0)
    assert last is not None
    assert 0 < last < 0.02


def test_the_learning_rate_warms_up(tmp_path: Path):
    settings = {"schedule": "linear", "lr": 1.0, "warmup_steps": 4}
    deadline = time_budget(tmp_path, step_s=10.0, learner=settings)
    assert [deadline.rate(step, 95.0 + step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def pace(*seconds: float) -> StepTimes:
    found = StepTimes(estimate_s=99.0)
    for value in seconds:
        found.observe(value)
    return found


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((), 99.0),
        ((4.0,), 4.0),
        ((4.0, 6.0), 6.0),
        ((4.0, 6.0, 5.0), 5.0),
        # A single stall is ignored.
        ((4.0, 4.0, 4.0, 4.0, 400.0), 4.0),
        # Factor 2 in three steps; the next step is two steps after their median.
        ((1.0, 1.0, 1.0, 2.0, 2.0, 2.0), 2.0 * 2 ** (2 / 3)),
        ((2.0, 2.0, 2.0, 1.0, 1.0, 1.0), 2 ** (-2 / 3)),
        # The growth is bounded: a factor of 1000 is not extrapolated.
        ((1.0, 1.0, 1.0, 1000.0, 1000.0, 1000.0), 1000 * 1.5**2),
    ],
)
def test_expected_step_time_follows_the_last_steps(seconds: tuple[float, ...], expected: float):
    assert pace(*seconds).expected_s() == pytest.approx(expected)


def test_a_fifth_of_a_steps_time_does_not_depend_on_its_prompts():
    assert pace(10.0).expected_s(share=0.5) == pytest.approx(6.0)
    found = StepTimes()
    found.observe(6.0, share=0.5)
    assert found.expected_s() == pytest.approx(10.0)
    assert StepTimes(estimate_s=20.0).expected_s(share=0.25) == pytest.approx(8.0)


def test_step_times_of_phases_are_separate():
    found = StepTimes(estimate_s=99.0)
    found.observe(3.0, phase="sft")
    assert (found.expected_s(phase="sft"), found.expected_s()) == (3.0, 99.0)
    found.observe(5.0)
    assert found.expected_s() == 5.0


def test_drift_compares_the_last_steps_with_the_first():
    assert StepTimes().drift == 1.0
    assert pace(2.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0).drift == 2.5
    assert pace(5.0, 4.0, 4.0, 3.0, 2.0, 2.0, 2.0).drift == 0.4
    assert pace(500.0, 4.0, 4.0, 3.0, 3.0, 3.0).drift == 0.5


def measured(**parts: list[float]) -> PartTimes:
    reserve = PartTimes({EXPORT: 7.0})
    for part, values in parts.items():
        for seconds in values:
            reserve.observe(part, seconds)
    return reserve


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], 7.0),
        ([4.0, 5.0], 5.0),
        ([5.0, 4.0], 4.0),
        ([4.0, 4.0, 40.0], 6.0),
        ([4.0, 4.0, 40.0, 4.0], 4.0),
    ],
)
def test_expected_time_is_the_last_measurement_except_after_a_stall(
    seconds: list[float], expected: float
):
    assert measured(export=seconds).expected_s(EXPORT) == expected


def test_longer_answers_lengthen_the_final_evaluations():
    tests = {evaluation_part("test"): [10.0], evaluation_part("boolq"): [2.0], EXPORT: [9.0]}
    assert measured(**tests).tests_s() == 12.0
    reserve = measured(**{evaluation_part("test"): [10.0], VALIDATION: [4.0, 5.0, 6.0]})
    assert reserve.tests_s(drift=7.0) == 15.0
    assert measured(**{evaluation_part("test"): [10.0]}).tests_s(drift=2.0) == 20.0


def test_minimum_run_time_by_hand():
    assert least_run_s(0) == 20.0
    assert least_run_s(2_000_000_000) == 25.0
