"""Estimated seconds of the next step and of the shutdown."""

from __future__ import annotations

import pytest

from pipeline.contracts.decisions import EXPORT, VALIDATION, evaluation_part
from pipeline.control.estimates import ShutdownEstimate, StepTimeEstimator, least_run_s


def pace(*seconds: float) -> StepTimeEstimator:
    found = StepTimeEstimator(estimate_s=99.0)
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
    found = StepTimeEstimator()
    found.observe(6.0, share=0.5)
    assert found.expected_s() == pytest.approx(10.0)
    assert StepTimeEstimator(estimate_s=20.0).expected_s(share=0.25) == pytest.approx(8.0)


def test_step_times_of_phases_are_separate():
    found = StepTimeEstimator(estimate_s=99.0)
    found.observe(3.0, phase="sft")
    assert (found.expected_s(phase="sft"), found.expected_s()) == (3.0, 99.0)
    found.observe(5.0)
    assert found.expected_s() == 5.0


def test_time_between_steps_is_averaged():
    found = StepTimeEstimator()
    for seconds in (0.0, 30.0, 0.0):
        found.observe_between(seconds)
    assert found.between_s == pytest.approx(10.0)


def test_drift_compares_the_last_steps_with_the_first():
    assert StepTimeEstimator().drift == 1.0
    assert pace(2.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0).drift == 2.5
    assert pace(5.0, 4.0, 4.0, 3.0, 2.0, 2.0, 2.0).drift == 0.4
    assert pace(500.0, 4.0, 4.0, 3.0, 3.0, 3.0).drift == 0.5


def measured(**parts: list[float]) -> ShutdownEstimate:
    reserve = ShutdownEstimate({EXPORT: 7.0})
    for part, values in parts.items():
        for seconds in values:
            reserve.observe(part, seconds)
    return reserve


def test_an_estimate_is_used_until_the_part_is_measured():
    reserve = ShutdownEstimate({EXPORT: 7.0})
    assert (reserve.part_s(EXPORT), reserve.part_s("checkpoint")) == (7.0, 0.0)
    reserve.observe(EXPORT, 3.0)
    assert reserve.part_s(EXPORT) == 3.0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([4.0, 5.0], 5.0), ([5.0, 4.0], 4.0), ([4.0, 4.0, 40.0], 6.0), ([4.0, 4.0, 40.0, 4.0], 4.0)],
)
def test_expected_time_is_the_last_measurement_except_after_a_stall(
    seconds: list[float], expected: float
):
    assert measured(export=seconds).part_s(EXPORT) == expected


def test_final_evaluations_exclude_the_validation_split():
    reserve = measured(
        **{evaluation_part("test"): [10.0], evaluation_part("boolq"): [2.0], EXPORT: [9.0]}
    )
    assert reserve.tests_s() == 12.0


def test_longer_answers_lengthen_the_final_evaluations():
    reserve = measured(**{evaluation_part("test"): [10.0], VALIDATION: [4.0, 5.0, 6.0]})
    assert reserve.tests_s(drift=7.0) == 15.0
    assert measured(**{evaluation_part("test"): [10.0]}).tests_s(drift=2.0) == 20.0


def test_measurements_are_read_from_the_journal():
    reserve = ShutdownEstimate()
    reserve.read([{"reason": EXPORT, "seconds": 3.0}, {"reason": EXPORT, "seconds": 4.0}])
    assert reserve.measured == {EXPORT: [3.0, 4.0]}


def test_minimum_run_time_by_hand():
    assert least_run_s(0) == 20.0
    assert least_run_s(2_000_000_000) == 25.0
