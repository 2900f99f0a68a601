"""The soft overlong punishment, by hand."""

from __future__ import annotations

import pytest

from rewards.overlong import overlong_punishment


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1)]
)
def test_the_penalty_falls_over_the_last_tokens(length: int, expected: float):
    found = overlong_punishment(length, budget=100, tokens=20)
    assert found == pytest.approx(expected)


def test_the_penalty_may_begin_with_the_first_token():
    assert overlong_punishment(1, budget=4, tokens=4) == -0.25
