from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.phases import PhaseClock, Span
from pipeline.run.ledger import (
    FATES,
    ROWS,
    Ledger,
    Work,
    account_seconds,
    kind_of,
    read_ledger,
)
from tests.fakes import FakeClock

STEP = (
    Span("sample", 0.0, 4.0),
    Span("reward", 4.0, 5.0),
    Span("learn", 5.0, 8.0),
    Span("sync", 8.0, 9.0),
)


def rows_of(*spans: Span, driver=STEP, until=9.0, **renamed: str) -> dict[str, float]:
    """The rows of one worker."""
    found = account_seconds(0.0, until, driver, {"worker": spans}, renamed=renamed)
    return found["worker"]


def test_a_worker_works_or_waits_for_what_the_driver_waits_for():
    assert rows_of(Span("decode", 0.5, 3.5)) == {
        "decode": 3.0,
        "waiting_samplers": 1.0,
        "waiting_rewards": 1.0,
        "waiting_learner": 3.0,
        "sync": 1.0,
    }
    assert account_seconds(0.0, 9.0, STEP, {}, renamed={}) == {
        "driver": {
            "waiting_samplers": 4.0,
            "waiting_rewards": 1.0,
            "waiting_learner": 3.0,
            "sync": 1.0,
        }
    }


def test_the_spare_share_of_a_span_has_a_row_of_its_own():
    rows = rows_of(Span("decode", 0.0, 4.0, spare=0.25), Span("update", 5.0, 8.0, spare=0.5))
    assert (rows["decode"], rows["decode_idle"]) == (3.0, 1.0)
    assert (rows["update"], rows["update_padding"]) == (1.5, 1.5)
    cached = rows_of(Span("compile", 0.0, 4.0, spare=0.75), driver=[Span("loading", 0.0, 9.0)])
    assert cached == {"compile": 1.0, "compile_cached": 3.0, "loading": 5.0}


@pytest.mark.parametrize("phase", ["calibration", "evaluation", "export", "checkpoint", "sync"])
def test_what_workers_compute_for_a_common_phase_belongs_to_it(phase):
    driver = [Span(phase, 0.0, 9.0)]
    assert rows_of(Span("decode", 1.0, 4.0, spare=0.5), driver=driver) == {phase: 9.0}
    # But new sizes are compiled at any time.
    rows = rows_of(Span("compile", 1.0, 4.0), driver=driver)
    assert rows == {"compile": 3.0, phase: 6.0}


def test_a_stall_replaces_what_the_process_was_doing():
    rows = rows_of(Span("decode", 0.0, 4.0, spare=0.5), Span("stalled", 1.0, 3.0))
    assert (rows["stalled"], rows["decode"], rows["decode_idle"]) == (2.0, 1.0, 1.0)


def test_while_the_driver_works_the_others_wait_for_it():
    driver = [Span("coordination", 0.0, 9.0)]
    assert rows_of(driver=driver) == {"waiting_driver": 9.0}
    assert account_seconds(0.0, 9.0, driver, {}, renamed={})["driver"] == {"coordination": 9.0}


def test_time_outside_of_all_phases_is_unexplained():
    assert rows_of(driver=[Span("sample", 2.0, 9.0)]) == {
        "unexplained": 2.0,
        "waiting_samplers": 7.0,
    }


SPANS = st.lists(
    st.tuples(
        st.sampled_from(["sample", "reward", "learn", "export", "coordination", "stalled"]),
        st.floats(-5, 25),
        st.floats(0, 10),
        st.floats(0, 1),
    ).map(lambda one: Span(one[0], one[1], one[1] + one[2], one[3])),
    max_size=8,
)


@given(driver=SPANS, own=SPANS)
def test_invariant_8_the_rows_of_a_process_sum_to_the_interval(driver, own):
    found = account_seconds(0.0, 20.0, driver, {"sampler 0": own}, renamed={})
    for rows in found.values():
        assert sum(rows.values()) == pytest.approx(20.0)
        assert min(rows.values()) > 0


def test_kinds():
    processes = ["driver", "learner", "sampler 0", "sampler 1", "reward correct 0"]
    assert [kind_of(process) for process in processes] == [
        "driver",
        "learner",
        "samplers",
        "samplers",
        "rewards",
    ]


# --- a run, its resume, and the file


class Run:
    """The ledgers of the processes of a run, with a learner that is always updating."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        self.now = FakeClock()
        self.start()

    def start(self, *, used_s: float = 0.0) -> None:
        """Starts a process, which is loading for 10 s."""
        self.phases = PhaseClock(self.now)
        self.ledger = Ledger(self.path, phases=self.phases, start_s=self.now())
        self.ledger.lost(used_s)
        with self.phases.during("loading"):
            self.now.seconds += 10

    def step(self, number: int, *, tokens: int = 7) -> None:
        """A step of 5 s."""
        with self.phases.during("learn"):
            began = self.now()
            self.now.seconds += 5
        self.ledger.account(
            number,
            {"learner": [Span("update", began, self.now())]},
            tokens={"trained": tokens},
            repeated=self.ledger.is_repeated(number),
        )


def test_accounts_are_appended_and_read_back(tmp_path: Path):
    run = Run(tmp_path)
    run.step(1)
    run.step(2, tokens=3)
    first, second = read_ledger(run.path)
    assert (first.step, first.start_s, first.end_s, first.tokens) == (1, 0.0, 15.0, {"trained": 7})
    assert first.seconds == {
        "driver": {"loading": 10.0, "waiting_learner": 5.0},
        "learner": {"loading": 10.0, "update": 5.0},
    }
    assert (second.start_s, second.end_s) == (15.0, 20.0)
    assert run.ledger.total.seconds["learner"] == {"loading": 10.0, "update": 10.0}
    assert (run.ledger.total.tokens, run.ledger.wall_s) == ({"trained": 10}, 20.0)
    assert run.ledger.take().tokens == {"trained": 10}
    assert run.ledger.take().seconds == {}


def test_the_first_step_is_the_first_account_with_work(tmp_path: Path):
    run = Run(tmp_path)
    run.ledger.account(50, {})  # the start of a fork of step 50
    ends = [run.ledger.first_step_s]
    for number in (51, 52):
        run.now.seconds += 5
        run.ledger.account(number, {}, work=Work(positions=8))
        ends.append(run.ledger.first_step_s)
    run.start()
    assert [*ends, run.ledger.first_step_s] == [None, 15.0, 15.0, 15.0]


def test_the_start_of_a_resumed_process_is_a_restart_and_its_steps_are_repeated(tmp_path: Path):
    run = Run(tmp_path)
    run.step(1)
    run.step(2)
    run.now.seconds += 100  # nobody runs it
    run.start()
    run.ledger.resumed()
    assert run.ledger.is_repeated(2)
    run.step(2)
    run.step(3)
    *_, again, new = read_ledger(run.path)
    assert again.seconds["learner"] == {"restart": 10.0, "repeated": 5.0}
    assert (again.tokens, again.start_s, again.end_s) == ({"repeated": 7}, 20.0, 35.0)
    assert (new.seconds["learner"], new.tokens) == ({"update": 5.0}, {"trained": 7})
    assert run.ledger.wall_s == 40.0
    assert sum(run.ledger.total.seconds["learner"].values()) == 40.0


def test_what_a_killed_process_did_after_its_last_account_is_repeated_work(tmp_path: Path):
    run = Run(tmp_path)
    run.step(1)
    before = run.path.read_bytes()
    run.start(used_s=27.0)  # killed 12 s after its last account
    assert run.path.read_bytes() == before  # a start that is refused changes nothing
    run.step(2)
    _, lost, step = read_ledger(run.path)
    assert (lost.start_s, lost.end_s, lost.seconds["learner"]) == (15.0, 27.0, {"repeated": 12.0})
    assert (step.start_s, step.end_s) == (27.0, 42.0)
    assert run.ledger.wall_s == 42.0


def test_a_process_without_an_account_has_its_seconds(tmp_path: Path):
    """The first one is killed before it knows its workers, the third one ends while it loads."""
    run = Run(tmp_path)
    run.start(used_s=12.0)
    run.step(1)
    lost, first = read_ledger(run.path)
    assert (lost.start_s, lost.end_s) == (0.0, 12.0)
    assert lost.seconds == {name: {"repeated": 12.0} for name in ("driver", "learner")}
    assert (first.start_s, first.end_s) == (12.0, 27.0)
    run.start(used_s=27.0)
    assert run.ledger.step == 1
    run.ledger.account(run.ledger.step, {})
    *_, third = read_ledger(run.path)
    assert (third.step, third.start_s, third.end_s) == (1, 27.0, 37.0)
    assert third.seconds == {name: {"loading": 10.0} for name in ("driver", "learner")}


def test_processes_are_those_that_report_or_else_those_before(tmp_path: Path):
    ledger = Run(tmp_path).ledger
    ledger.account(1, {"learner": (), "reward one 0": (), "reward two 0": ()})
    # The rewards do not answer; later, after a resume with other rewards, they are fewer.
    ledger.account(2, {"learner": ()})
    assert ledger.processes == ["driver", "learner", "reward one 0", "reward two 0"]
    ledger.account(3, {"learner": (), "reward one 0": ()})
    assert ledger.processes == ["driver", "learner", "reward one 0"]
    ledger.account(3, {})
    assert ledger.processes == ["driver", "learner", "reward one 0"]


def test_rows_and_fates_have_distinct_names():
    assert len(set(ROWS)) == len(ROWS)
    assert len(set(FATES)) == len(FATES)
