"""How long the next step will take."""

from __future__ import annotations

import pytest

from pipeline.control.pace import Pace


def pace(*seconds: float) -> Pace:
    found = Pace(estimate_s=99.0)
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
        # A stall is not believed.
        ((4.0, 4.0, 4.0, 4.0, 400.0), 4.0),
        # Twice as long in three steps: the next lies two steps behind the middle one of them.
        ((1.0, 1.0, 1.0, 2.0, 2.0, 2.0), 2.0 * 2 ** (2 / 3)),
        ((2.0, 2.0, 2.0, 1.0, 1.0, 1.0), 2 ** (-2 / 3)),
        # Nobody thinks that a thousandfold goes on.
        ((1.0, 1.0, 1.0, 1000.0, 1000.0, 1000.0), 1000 * 1.5**2),
    ],
)
def test_the_next_step_is_like_the_last_ones(seconds: tuple[float, ...], expected: float):
    assert pace(*seconds).expected_s() == pytest.approx(expected)


def test_a_fifth_of_a_step_does_not_shrink_with_its_prompts():
    assert pace(10.0).expected_s(share=0.5) == pytest.approx(6.0)
    found = Pace()
    found.observe(6.0, share=0.5)
    assert found.expected_s() == pytest.approx(10.0)
    assert Pace(estimate_s=20.0).expected_s(share=0.25) == pytest.approx(8.0)


def test_steps_of_another_kind_say_nothing():
    found = Pace(estimate_s=99.0)
    found.observe(3.0, kind="sft")
    assert (found.expected_s(kind="sft"), found.expected_s()) == (3.0, 99.0)
    found.observe(5.0)
    assert found.expected_s() == 5.0


def test_what_is_done_between_steps_is_averaged():
    found = Pace()
    for seconds in (0.0, 30.0, 0.0):
        found.observe_between(seconds)
    assert found.between_s == pytest.approx(10.0)


def test_the_drift_is_from_the_first_steps_to_the_last():
    assert Pace().drift == 1.0
    assert pace(2.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0).drift == 2.5
    assert pace(5.0, 4.0, 4.0, 3.0, 2.0, 2.0, 2.0).drift == 0.4
    assert pace(500.0, 4.0, 4.0, 3.0, 3.0, 3.0).drift == 0.5
