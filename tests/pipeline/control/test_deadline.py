"""Used time, and whether another step fits into the time left."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.contracts.clock import Clock
from pipeline.contracts.decisions import EXIT, EXPORT, VALIDATION, evaluation_part
from pipeline.control.deadline import Deadline
from pipeline.control.estimates import SAFETY, ShutdownEstimate
from tests.fakes import FakeClock


def test_elapsed_time_includes_earlier_processes():
    now = FakeClock()
    now.seconds = 107.0
    assert Clock(started=100.0, used_before_s=50.0, now=now).elapsed_s == 57.0
    assert Clock(started=100.0).now is time.monotonic


@pytest.mark.parametrize("used", [True, False])
def test_waiting_for_devices_stops_the_clock_unless_it_is_used_time(used: bool):
    now = FakeClock()
    clock = Clock(started=0.0, used_before_s=50.0, now=now)
    for seconds in (10.0, 30.0):
        now.seconds += 1.0
        before_s = clock.elapsed_s
        with clock.waiting(used=used):
            now.seconds += seconds
            assert clock.elapsed_s == before_s + (seconds if used else 0.0)
    assert clock.waited_s == 40.0
    assert clock.elapsed_s == 52.0 + (40.0 if used else 0.0)


def test_an_interrupted_wait_is_measured():
    now = FakeClock()
    clock = Clock(started=0.0, now=now)
    with suppress(KeyboardInterrupt), clock.waiting(used=False):
        now.seconds += 9.0
        raise KeyboardInterrupt
    now.seconds += 1.0
    assert (clock.waited_s, clock.elapsed_s) == (9.0, 1.0)


def test_a_budget_of_steps_counts_steps():
    deadline = Deadline(steps=3, time_s=None)
    deadline.step_time.observe(1e9)
    assert [deadline.allows(step, 0.0) for step in range(5)] == [True, True, True, False, False]
    assert deadline.reserving(5.0) is None
    assert deadline.evaluated_share(0.0) == 1.0


def time_budget(
    *,
    time_s: float = 1000.0,
    left_s: float,
    step_s: float = 100.0,
    prompts: tuple[int, int] = (4, 4),
) -> At:
    """Validation 20 s, tests 50 s, export 30 s, exit 5 s."""
    parts = {VALIDATION: 20.0, EXPORT: 30.0, EXIT: 5.0, evaluation_part("test"): 50.0}
    deadline = Deadline(
        steps=None,
        time_s=time_s,
        prompts=prompts,
        validates=True,
        shutdown=ShutdownEstimate(parts),
    )
    deadline.step_time.observe(step_s)
    return At(deadline, time_s - left_s)


@dataclass
class At:
    """A deadline at a moment: its methods get this clock reading."""

    deadline: Deadline
    now_s: float

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.deadline, name)
        if not callable(found):
            return found
        if name in {"reserving", "reserve_for_export_s"}:
            return found
        if name in {"allows", "missing_s", "missing_for_update_s"}:
            return lambda first, **more: found(first, self.now_s, **more)
        return lambda *args, **more: found(self.now_s, *args, **more)


@pytest.mark.parametrize(("left_s", "allowed"), [(205.1, True), (204.9, False)])
def test_a_step_starts_if_step_and_shutdown_fit(left_s: float, allowed: bool):
    # A step with its validation takes 12% of the budget, more than may stay idle: no slack.
    assert time_budget(left_s=left_s).allows(7) is allowed


@pytest.mark.parametrize("spare_s", [-0.1, 0.1])
def test_slack_is_kept_if_steps_are_short(spare_s: float):
    # Slack is 20% of the measured shutdown plus 1% of the budget: 0.2 * 100 + 100, but at most 2%
    # of the budget less a step and its validation: 200 - 30, or 0.
    needed_s = 10 + 105 + (SAFETY - 1) * 100 + 100
    deadline = time_budget(time_s=10_000.0, left_s=needed_s + spare_s, step_s=10.0)
    assert deadline.allows(7) is (spare_s > 0)
    deadline = time_budget(left_s=5 + 105 + spare_s, step_s=5.0)
    assert deadline.allows(7) is (spare_s > 0)


def test_a_step_has_as_many_prompts_as_fit():
    # The shutdown takes 105 s, a step 20 s and 20 s per prompt.
    for left_s, size in [(205.1, 4), (190, 3), (170, 2), (164, 1), (145.1, 1), (144.9, 0)]:
        assert time_budget(left_s=left_s, prompts=(4, 1)).prompts_that_fit() == size, left_s
    assert time_budget(left_s=170, prompts=(4, 3)).prompts_that_fit() == 0


@pytest.mark.parametrize(("left_s", "sft_prompts", "grpo_prompts"), [(205.1, 4, 4), (204.9, 0, 3)])
def test_an_sft_step_has_one_size(left_s: float, sft_prompts: int, grpo_prompts: int):
    deadline = time_budget(left_s=left_s, prompts=(4, 1))
    assert deadline.prompts_that_fit() == grpo_prompts
    deadline.step_time.observe(100.0, phase="sft")
    assert deadline.prompts_that_fit(phase="sft") == sft_prompts
    assert deadline.allows(7, phase="sft") is (sft_prompts > 0)


def test_step_times_of_earlier_processes_are_recalled_by_phase():
    rows = [
        {"step": 1, "time/step_s": 10.0},
        {"step": 2, "time/step_s": 10.0},
        {"step": 3, "time/step_s": 40.0, "time/learn_s": 16.0, "rollout/prompts_planned": 4},
    ]
    found = Deadline(steps=None, time_s=1000.0, prompts=(4, 1))
    found.recall(rows[:2], sft_steps=2)
    assert found.step_time.expected_s(phase="sft") == pytest.approx(10.0)
    assert found.update_time.expected_s(share=1.0) == 0.0
    found.recall(rows[2:], sft_steps=2)
    assert found.step_time.expected_s() == pytest.approx(40.0)
    assert found.update_time.expected_s(share=1.0) == pytest.approx(16.0)


def test_steps_left_count_time_between_steps_and_validations():
    deadline = time_budget(time_s=1e5, left_s=1e5, step_s=100.0)
    slack_s = (SAFETY - 1) * 100 + 1000
    assert deadline.steps_left() == (1e5 - 105 - slack_s) // 100
    deadline.step_time.observe_between(25.0)
    left = (1e5 - 105 - slack_s + 25) // 125
    assert deadline.steps_left() == left
    # Validations of 20 s each: after every tenth step except the last one.
    free_s = 1e5 - 105 - slack_s + 25
    found = deadline.steps_left(lambda steps: (steps - 1) // 10)
    assert found == pytest.approx(free_s / 127, abs=1)
    assert 125 * found + 20 * ((found - 1) // 10) <= free_s < 125 * (found + 1) + 20 * (found // 10)


def test_one_step_is_planned_even_if_a_validation_leaves_no_time_for_another():
    deadline = time_budget(left_s=1000.0, step_s=100.0)
    assert deadline.steps_left() > 1
    assert deadline.steps_left(lambda steps: 10**6 * (steps - 1)) == 1


def test_an_update_needs_time_for_its_export():
    # The update is assumed to take 1.5 * 100 s; validation, export and exit 55 s; tests can shrink.
    deadline = time_budget(left_s=200.0)
    assert deadline.missing_for_update_s(100.0, share=1.0) == pytest.approx(5.0)
    deadline.update_time.observe(140.0)
    assert deadline.missing_for_update_s(100.0, share=1.0) == pytest.approx(-5.0)


def test_work_is_abandoned_when_only_reserved_time_is_left():
    deadline = time_budget(time_s=1000.0, left_s=200.0)
    found = deadline.reserving(60.0)
    assert found.until_s == pytest.approx(940.0)


def test_abandoned_work_may_take_the_time_before_an_export_to_stop():
    deadline = time_budget(time_s=1000.0, left_s=200.0)
    export_s = deadline.reserve_for_export_s(tests=False)
    found = deadline.reserving(60.0)
    assert found.stopped_by_s == pytest.approx(1000.0 - export_s)
    assert found.stopping_s(800.0) == pytest.approx(200.0 - export_s)
    assert found.stopping_s(1000.0 - export_s) == pytest.approx(3.0)


@pytest.mark.parametrize(("left_s", "share"), [(60.0, 1.0), (55.0, 0.9999), (25.0, 0.5), (-3.0, 0)])
def test_the_final_evaluation_is_shortened_to_the_time_left(left_s: float, share: float):
    assert time_budget(left_s=left_s).evaluated_share() == pytest.approx(share)
