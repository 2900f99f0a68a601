from __future__ import annotations

import pytest

from pipeline.contracts.phases import PhaseClock, Span
from tests.fakes import FakeClock


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
    assert phases.take() == [
        Span("decode", 0.0, 2.0),
        Span("prefill", 2.0, 3.0),
        Span("decode", 3.0, 7.0),
    ]
    assert (inner, phases.take()) == ("prefill", [])


def test_the_spare_share_holds_for_the_whole_phase_and_not_for_inner_ones(now: FakeClock):
    phases = PhaseClock(now)
    with phases.during("decode"):
        now.seconds = 1.0
        with phases.during("prefill"):
            now.seconds = 2.0
        now.seconds = 3.0
        phases.set_spare(0.25)
    assert [span.spare for span in phases.take()] == [0.25, 0.0, 0.25]


def test_a_phase_under_way_is_reported_up_to_now_and_goes_on(now: FakeClock):
    phases = PhaseClock(now)
    with phases.during("update"):
        now.seconds = 2.0
        assert phases.take() == [Span("update", 0.0, 2.0)]
        now.seconds = 5.0
    assert phases.take() == [Span("update", 2.0, 5.0)]


def test_a_phase_within_itself_that_takes_no_time_ends_alone(now: FakeClock):
    phases = PhaseClock(now)
    with phases.during("checkpoint"):
        with phases.during("checkpoint"):
            pass
        now.seconds = 1.0
    assert phases.take() == [Span("checkpoint", 0.0, 1.0)]


def test_a_phase_ends_when_its_block_raises(now: FakeClock):
    phases = PhaseClock(now)

    def fails() -> None:
        with phases.during("export"):
            now.seconds = 1.0
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fails()
    assert (phases.current, phases.take()) == (None, [Span("export", 0.0, 1.0)])


@pytest.mark.parametrize(
    ("last_s", "now_s", "cpu_s", "stalled"),
    [
        (10.0, 10.6, 0.0, False),  # two ticks
        (10.0, 16.0, 0.1, True),  # SIGSTOP
        (10.0, 16.0, 5.0, False),  # a busy machine, or code that keeps the interpreter's lock
    ],
)
def test_a_process_that_did_not_run_has_stalled(last_s, now_s, cpu_s, stalled):
    phases = PhaseClock(lambda: now_s)
    phases.tick(last_s, now_s, cpu_s=cpu_s)
    assert phases.take() == ([Span("stalled", last_s, now_s)] if stalled else [])
