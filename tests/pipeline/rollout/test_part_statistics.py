"""Statistics of reward parts, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.rollout.part_statistics import Groups, correlation, repetition

NAN = float("nan")
GROUPS = Groups(["a", "a", "a", "b", "b", "c"])


def test_the_spread_is_the_mean_of_the_groups_deviations():
    values = np.array(
        [
            [0.0, 0.0, 3.0, 1.0, 1.0, 9.0],  # sqrt(2), 0; a group of one has no deviation
            [2.0, NAN, 4.0, NAN, 5.0, NAN],  # 1; one value left in b
            [NAN] * 6,
        ]
    )
    assert GROUPS.spread(values) == [pytest.approx(2**0.5 / 2), 1.0, None]
    # The mean of 0.1 three times is not 0.1.
    assert GROUPS.spread(np.full((1, 6), 0.1)) == [0.0]


def test_the_interval_of_a_share_is_that_of_groups():
    # Sums 1, 0 and 1 of 3, 2 and 1 rollouts, less 1/3 of each count: 0, -2/3 and 2/3.
    share, half_width = GROUPS.ratio(np.array([1.0, 0, 0, 0, 0, 1]), np.ones(6))
    assert share == pytest.approx(1 / 3)
    # As if rollouts were independent, the squares are (2 * 4/9 + 4 * 1/9) * 6/5 = 8/5, more than
    # 8/9 * 3/2 = 4/3; Student's t has two degrees of freedom.
    assert half_width == pytest.approx(4.302653 * (8 / 5) ** 0.5 / 6)
    # Rollouts of a group that agree are one.
    share, half_width = GROUPS.ratio(np.array([1.0, 1, 1, 0, 0, 0]), np.ones(6))
    assert share == pytest.approx(1 / 2)
    squares = (9 / 4 + 1 + 1 / 4) * 3 / 2
    assert half_width == pytest.approx(4.302653 * squares**0.5 / 6)
    assert GROUPS.ratio(np.zeros(6), np.zeros(6)) == (None, None)
    assert Groups(["a", "a"]).ratio(np.ones(2), np.ones(2)) == (1.0, None)


def test_a_correlation_with_a_constant_or_without_pairs_is_not_defined():
    one = np.array([1.0, 2.0, 3.0, NAN, 9.0])
    assert correlation(one, np.array([6.0, 4.0, 2.0, 7.0, NAN])) == pytest.approx(-1)
    assert correlation(one, np.array([1.0, 3.0, 2.0, 0.0, NAN])) == pytest.approx(0.5)
    assert correlation(one, np.array([0.1, 0.1, 0.1, 5.0, NAN])) is None
    assert correlation(one, np.array([NAN, NAN, 2.0, 7.0, NAN])) is None


def test_repetition_is_the_share_of_4_grams_that_occurred_before():
    # 1 2 3 1 2 3 1: 1231, 2312, 3123, 1231.
    assert repetition(np.array([1, 2, 3, 1, 2, 3, 1])) == pytest.approx(1 / 4)
    assert repetition(np.array([7] * 8)) == pytest.approx(4 / 5)
    assert repetition(np.arange(9)) == 0.0
    assert repetition(np.arange(4)) == 0.0
    assert repetition(np.arange(3)) is None
