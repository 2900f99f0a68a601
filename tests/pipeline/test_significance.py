"""Intervals and p-values against published examples."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.significance import compare_paired, measure_accuracy


def _pairs(*, both: int, gained: int, lost: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    before = [True] * both + [False] * gained + [True] * lost + [False] * neither
    after = [True] * (both + gained) + [False] * (lost + neither)
    return np.array(before), np.array(after)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals(right: int, n: int, low: float, high: float):
    measured = measure_accuracy(np.array([True] * right + [False] * (n - right)))
    assert measured.accuracy == right / n
    assert measured.n == n
    assert measured.ci95 == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("table", "difference", "low", "high"),
    [
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017), ch. 8:
        # airway hyper-responsiveness (Bentur 2009), complete response (Cavo 2012)
        ({"both": 1, "gained": 1, "lost": 7, "neither": 12}, -0.286, -0.507, -0.026),
        ({"both": 59, "gained": 6, "lost": 16, "neither": 80}, -0.0621, -0.1186, -0.0046),
    ],
)
def test_newcombes_intervals(table: dict[str, int], difference: float, low: float, high: float):
    change = compare_paired(*_pairs(**table))
    assert change.difference == pytest.approx(difference, abs=5e-4)
    assert change.ci95 == pytest.approx((low, high), abs=5e-4)


def test_mcnemar_by_hand():
    change = compare_paired(*_pairs(both=1, gained=1, lost=7, neither=12))
    # two sides of at most 1 head in 8 tosses
    assert change.p == pytest.approx(2 * (comb(8, 0) + comb(8, 1)) / 2**8)
    assert (change.gained, change.lost, change.n) == (1, 7, 21)


def test_nothing_changed():
    same = np.array([True, False, True])
    change = compare_paired(same, same)
    assert (change.difference, change.p, change.gained, change.lost) == (0.0, 1.0, 0, 0)
    assert change.ci95[0] < 0 < change.ci95[1]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_before_and_after_are_mirror_images(both: int, gained: int, lost: int, neither: int):
    if both + gained + lost + neither == 0:
        return
    before, after = _pairs(both=both, gained=gained, lost=lost, neither=neither)
    there, back = compare_paired(before, after), compare_paired(after, before)
    low, high = there.ci95
    assert -1 <= low <= there.difference <= high <= 1
    assert back.difference == -there.difference
    assert back.ci95 == pytest.approx((-high, -low), abs=1e-12)
    assert back.p == pytest.approx(there.p)


def test_what_are_no_answers_is_refused():
    right = np.array([True, False])
    with pytest.raises(ValueError, match="2 answers before and 1 after are no pairs"):
        compare_paired(right, right[:1])
    with pytest.raises(ValueError, match=r"shape \(0,\); expected bool"):
        measure_accuracy(np.zeros(0, bool))
    with pytest.raises(ValueError, match="answers are float64"):
        measure_accuracy(np.ones(3))
