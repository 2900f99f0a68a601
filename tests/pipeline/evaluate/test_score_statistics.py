"""Intervals and p-values of mean scores, against exact tests and simulated data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluate.score_statistics import (
    DRAWS,
    MOST_SIGNS,
    MeanScore,
    compare_scores,
    mean_interval,
    mean_score,
    measure_scores,
    sign_flip_test,
)
from pipeline.evaluate.significance import PairedChange, compare_paired

NONE = np.nan
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("draw", "mean", "n", "least"),
    [
        (lambda rng, shape: rng.normal(size=shape), 0.0, 10, 0.925),
        slow(lambda rng, shape: rng.beta(0.5, 1.5, shape), 0.25, 30, 0.925),
        # Skewed, as rewards by length: intervals of all methods are too narrow for few prompts.
        slow(lambda rng, shape: rng.exponential(size=shape), 1.0, 20, 0.91),
    ],
)
def test_intervals_of_the_mean_have_the_stated_coverage(
    draw: Draw, mean: float, n: int, least: float
):
    values = draw(np.random.default_rng(1), (400, n))
    low, high = np.array([mean_interval(sample) for sample in values]).T
    assert least <= ((low <= mean) & (mean <= high)).mean() <= 0.975
    assert (low < values.mean(axis=1)).all()
    assert (values.mean(axis=1) < high).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_an_interval_lies_within_the_scores_and_moves_with_them(scores: list[float]):
    values = np.array(scores)[:, None]
    found = measure_scores(values)
    assert found.score == pytest.approx(float(np.mean(scores)), abs=1e-6)
    if found.ci95 is None:
        assert np.ptp(values) <= 1e-9 * np.abs(values).max()
        return
    low, high = found.ci95
    size = 1e-9 * np.abs(values).max()
    assert values.min() - size <= low <= high <= values.max() + size
    mirrored = measure_scores(-values).ci95
    assert mirrored is not None
    spread = float(np.ptp(values))
    assert mirrored == pytest.approx((-high, -low), abs=0.02 * spread)


def test_samples_of_a_prompt_are_averaged_first_without_those_that_have_no_score():
    scores = np.array([[0.0, 1.0, 2.0], [4.0, NONE, NONE], [NONE, 1.0, 3.0], [NONE, NONE, NONE]])
    found = measure_scores(scores)
    assert found.score == mean_score(scores) == pytest.approx((1 + 4 + 2) / 3)
    assert found.n == 3
    assert found == measure_scores(np.array([[1.0], [4.0], [2.0]]))
    # Copies of a sample add no information.
    assert found == measure_scores(np.repeat([[1.0], [4.0], [2.0]], 8, axis=1))


def test_degenerate_scores_have_no_interval():
    assert measure_scores(np.full((5, 2), 0.5)) == MeanScore(0.5, 5, None)
    assert measure_scores(np.array([[0.7]])) == MeanScore(0.7, 1, None)
    assert measure_scores(np.array([[NONE], [NONE]])) == MeanScore(None, 0, None)
    # Equal up to rounding: 0.1 + 0.2 is not 0.3.
    assert measure_scores(np.array([[0.1 + 0.2], [0.3]])).ci95 is None
    same = np.array([[0.2], [0.9]])
    assert compare_scores(same, same) == PairedChange(0.0, None, 1.0, "sign flips, exact", 0, 0, 2)
    nothing = compare_scores(np.array([[NONE], [1.0]]), np.array([[1.0], [NONE]]))
    assert nothing == PairedChange()


@given(st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=8))
def test_the_sign_flip_test_counts_all_signs(differences: list[float]):
    observed = abs(sum(differences))
    sums = [
        abs(float(np.dot(signs, differences)))
        for signs in product([1, -1], repeat=len(differences))
    ]
    p, test = sign_flip_test(np.array(differences))
    assert p == pytest.approx(np.mean([total >= observed - 1e-9 for total in sums]))
    assert test == "sign flips, exact"


def test_many_prompts_are_tested_with_random_signs():
    before = np.array([False] * 40 + [True] * 22)
    exact = compare_paired(before, ~before).p
    assert exact is not None
    p, test = sign_flip_test((~before).astype(float) - before)
    assert p == pytest.approx(exact, abs=4 * (exact * (1 - exact) / DRAWS) ** 0.5 + 1e-5)
    assert test == f"sign flips, {DRAWS} draws"
    # An improvement of every prompt is no p-value of 0: the observed signs are counted, too.
    assert sign_flip_test(np.ones(MOST_SIGNS + 40))[0] == 1 / (DRAWS + 1)
