"""Intervals and p-values against published examples, exact tests and simulated data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from math import comb

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
from pipeline.evaluate.significance import PairedChange, compare_paired, measure_accuracy, pass_at


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
    # each of the two tails has at most 1 head in 8 tosses
    assert change.p == pytest.approx(2 * (comb(8, 0) + comb(8, 1)) / 2**8)
    assert (change.gained, change.lost, change.n) == (1, 7, 21)


def _answers(*rows: str) -> np.ndarray:
    """Bool `prompts samples` from rows such as "110"."""
    return np.array([[mark == "1" for mark in row] for row in rows])


ANSWERS = (
    st.integers(1, 4)
    .flatmap(
        lambda samples: st.lists(
            st.lists(st.booleans(), min_size=samples, max_size=samples), min_size=1
        )
    )
    .map(np.array)
)
PAIRS = st.tuples(st.integers(1, 8), st.integers(2, 4), st.randoms(use_true_random=False)).map(
    lambda given: tuple(
        np.array([[given[2].random() < 0.5 for _ in range(given[1])] for _ in range(given[0])])
        for _ in range(2)
    )
)


def test_the_effective_number_of_answers_is_between_those_of_prompts_and_of_answers():
    once = _answers("1", "0", "1", "1", "0")
    assert measure_accuracy(np.repeat(once, 8, axis=1)) == measure_accuracy(once)
    # Prompts differ no more than by chance: 4 x 4 answers, half right.
    measured = measure_accuracy(_answers("1100", "0110", "0011", "1010"))
    assert measured.ci95 == measure_accuracy(np.array([True, False] * 2)).ci95
    spread = measure_accuracy(_answers("1110", "0110", "0010", "1010"))
    # Means 3/4, 1/2, 1/4, 1/2 vary by 1/24: 4 * 1/4 * 24 = 24 answers' worth, of which 16 exist.
    assert spread.ci95 == pytest.approx(measure_accuracy(np.array([True, False] * 8)).ci95)


def test_intervals_have_the_stated_coverage_for_clustered_samples():
    rng = np.random.default_rng(0)
    covered = changed = 0
    for _ in range(1000):
        chances = rng.beta(0.6, 0.4, size=(80, 1))
        before, after = rng.random((2, 80, 4)) < chances
        low, high = measure_accuracy(before).ci95
        covered += low <= 0.6 <= high
        low, high = compare_paired(before, after).ci95 or (1.0, 1.0)
        changed += low <= 0 <= high
    assert 0.93 <= covered / 1000 <= 0.975
    assert 0.93 <= changed / 1000 <= 0.985


@given(PAIRS)
def test_the_randomization_test_counts_all_signs(pair: tuple[np.ndarray, np.ndarray]):
    before, after = pair
    difference = after.sum(axis=1).astype(int) - before.sum(axis=1).astype(int)
    sums = [abs(int(difference @ signs)) for signs in product([1, -1], repeat=len(difference))]
    expected = sum(total >= abs(difference.sum()) for total in sums) / len(sums)
    change = compare_paired(before, after)
    assert change.p == pytest.approx(expected, abs=1e-12)
    assert change.test == "paired randomization, exact"
    assert change.difference == pytest.approx(after.mean() - before.mean())
    assert change.ci95 is not None
    low, high = change.ci95
    assert -1 <= low <= after.mean() - before.mean() + 1e-12
    assert after.mean() - before.mean() - 1e-12 <= high <= 1


@given(ANSWERS)
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(answers: np.ndarray):
    samples = answers.shape[1]
    for k in range(1, samples + 1):
        choices = [list(chosen) for chosen in combinations(range(samples), k)]
        expected = np.mean([answers[:, chosen].any(axis=1).mean() for chosen in choices])
        assert pass_at(answers, k) == pytest.approx(expected)


# --- mean scores, against exact tests and simulated data


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
