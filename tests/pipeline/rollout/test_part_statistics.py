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
