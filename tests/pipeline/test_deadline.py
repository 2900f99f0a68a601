"""When to stop."""

from __future__ import annotations

import time

import pytest

from pipeline.deadline import SAFETY, Clock, Deadline
from tests.fakes import FakeClock


def test_a_clock_counts_from_the_start_of_the_process_and_what_was_used_before():
    now = FakeClock()
    now.seconds = 107.0
    assert Clock(started=100.0, used_before_s=50.0, now=now).elapsed_s == 57.0
    assert Clock(started=100.0).now is time.monotonic


def test_a_budget_of_steps_counts_steps():
    deadline = Deadline(Clock(0.0, now=FakeClock()), steps=3, time_s=None)
    deadline.observe_step(1e9)
    assert [deadline.allows(step) for step in range(5)] == [True, True, True, False, False]


def time_budget(*, seconds: float, reserve: float) -> tuple[FakeClock, Deadline]:
    now = FakeClock()
    return now, Deadline(Clock(0.0, now=now), steps=None, time_s=seconds, reserve_s=reserve)


@pytest.mark.parametrize(("elapsed", "allowed"), [(0.0, True), (49.0, True), (50.0, False)])
def test_before_the_first_step_only_the_end_is_reserved(elapsed: float, allowed: bool):
    now, deadline = time_budget(seconds=100.0, reserve=50.0 / SAFETY)
    now.seconds = elapsed
    assert deadline.allows(0) is allowed


def test_the_slowest_step_counts_not_the_last():
    now, deadline = time_budget(seconds=100.0, reserve=0.0)
    deadline.observe_step(40.0)
    deadline.observe_step(1.0)
    now.seconds = 100 - 40 * SAFETY - 0.1
    assert deadline.allows(7)
    now.seconds += 0.2
    assert not deadline.allows(7)
