"""What the end of a run needs."""

from __future__ import annotations

import pytest

from pipeline.control.reserve import EXPORT, VALIDATION, Reserve, evaluation, least_run_s


def measured(**parts: list[float]) -> Reserve:
    reserve = Reserve({EXPORT: 7.0})
    for part, values in parts.items():
        for seconds in values:
            reserve.observe(part, seconds)
    return reserve


def test_an_estimate_holds_until_it_is_measured():
    reserve = Reserve({EXPORT: 7.0})
    assert (reserve.part_s(EXPORT), reserve.part_s("checkpoint")) == (7.0, 0.0)
    reserve.observe(EXPORT, 3.0)
    assert reserve.part_s(EXPORT) == 3.0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([4.0, 5.0], 5.0), ([5.0, 4.0], 4.0), ([4.0, 4.0, 40.0], 6.0), ([4.0, 4.0, 40.0, 4.0], 4.0)],
)
def test_the_next_time_is_like_the_last_unless_that_was_a_stall(
    seconds: list[float], expected: float
):
    assert measured(export=seconds).part_s(EXPORT) == expected


def test_tests_are_all_evaluations_but_that_of_the_validation_split():
    reserve = measured(**{evaluation("test"): [10.0], evaluation("boolq"): [2.0], EXPORT: [9.0]})
    assert reserve.tests_s() == 12.0


def test_answers_that_become_longer_make_the_tests_longer():
    reserve = measured(**{evaluation("test"): [10.0], VALIDATION: [4.0, 5.0, 6.0]})
    assert reserve.tests_s(drift=7.0) == 15.0
    assert measured(**{evaluation("test"): [10.0]}).tests_s(drift=2.0) == 20.0


def test_a_resumed_run_reads_its_journal():
    reserve = Reserve()
    reserve.read([{"reason": EXPORT, "seconds": 3.0}, {"reason": EXPORT, "seconds": 4.0}])
    assert reserve.measured == {EXPORT: [3.0, 4.0]}


def test_no_run_does_without_starting_and_writing_what_it_exports():
    assert least_run_s(0) == 20.0
    assert least_run_s(2_000_000_000) == 25.0
