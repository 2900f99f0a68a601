from __future__ import annotations

import pytest

from pipeline.clock import Heartbeat, PhaseClock
from tests.run_process import FakeClock


@pytest.fixture
def now() -> FakeClock:
    return FakeClock()


def test_time_belongs_to_the_innermost_phase(now: FakeClock):
    phases = PhaseClock(now)
    with phases.during("decode"):
        now.seconds = 2.0
        with phases.during("prefill"):
            inner = phases.current
            now.seconds = 3.0
        now.seconds = 7.0
    now.seconds = 9.0
    assert phases.take() == {"decode": 6.0, "prefill": 1.0}
    assert (inner, phases.take()) == ("prefill", {})


def test_a_phase_under_way_counts_to_now_and_goes_on(now: FakeClock):
    phases = PhaseClock(now)
    with phases.during("update"):
        now.seconds = 2.0
        assert phases.take() == {"update": 2.0}
        now.seconds = 5.0
        phases.add("loading", 1.5)
    assert phases.take() == {"update": 3.0, "loading": 1.5}


def test_a_phase_ends_when_its_block_raises(now: FakeClock):
    phases = PhaseClock(now)

    def fails() -> None:
        with phases.during("export"):
            now.seconds = 1.0
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fails()
    assert (phases.current, phases.take()) == (None, {"export": 1.0})


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
