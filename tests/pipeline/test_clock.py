"""The run's clock, and the phases of a process."""

from __future__ import annotations

import pytest

from pipeline.clock import Clock, Heartbeat, PhaseClock
from tests.run_process import FakeClock


@pytest.fixture
def now() -> FakeClock:
    return FakeClock()


def test_used_time_includes_earlier_processes_and_no_waits(now: FakeClock):
    now.seconds = 100.0
    clock = Clock(started=100.0, used_before_s=50.0, now=now)
    for seconds in (10.0, 30.0):
        now.seconds += 1.0
        before_s = clock.elapsed_s
        with clock.waiting():
            now.seconds += seconds
            assert clock.elapsed_s == before_s
    assert (clock.waited_s, clock.elapsed_s) == (40.0, 52.0)


def test_time_belongs_to_the_innermost_phase(now: FakeClock):
    phases = PhaseClock(now)

    def fails() -> None:
        with phases.during("prefill"):
            now.seconds = 3.0
            raise ValueError("planted")

    with phases.during("decode"):
        now.seconds = 2.0
        with pytest.raises(ValueError, match="planted"):
            fails()
        assert phases.current == "decode"
        now.seconds = 7.0
        # A phase under way counts to now and goes on.
        assert phases.take() == {"decode": 6.0, "prefill": 1.0}
        now.seconds = 9.0
        phases.add("loading", 1.5)
    now.seconds = 20.0
    assert phases.take() == {"decode": 2.0, "loading": 1.5}
    assert phases.current is None


def test_a_heartbeat_has_the_time_without_progress(now: FakeClock):
    phases = PhaseClock(now)
    assert phases.heartbeat() == Heartbeat()
    with phases.during("update"):
        now.seconds = 3.0
        assert phases.heartbeat() == Heartbeat("update", 3.0)
        phases.take()
        assert phases.heartbeat() == Heartbeat("update", 3.0)
        phases.progress()
        now.seconds = 4.0
        assert phases.heartbeat() == Heartbeat("update", 1.0)
