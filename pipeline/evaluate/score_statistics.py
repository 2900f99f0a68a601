"""Confidence intervals of mean scores with real values, and paired comparison of two of them.

Scores are float arrays `prompts samples`, NaN where an answer has none, with the same prompts in
the same order before and after. Samples of one prompt are not independent, so the unit of analysis
is the prompt: its score is the mean of its samples that have one, and a prompt without such samples
is left out. Intervals are 95% intervals; p-values are two-sided. All random numbers have a fixed
seed: equal scores give equal results.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import ndtr, stdtrit

from pipeline.evaluate.significance import LEVEL, PairedChange

_SEED = 0
RESAMPLES = 10_000
"""Bootstrap resamples of an interval."""
DRAWS = 20_000
"""Random choices of signs of a randomization test with many prompts."""
MOST_SIGNS = 16
"""Most prompts with a difference for which all 2**n choices of signs are counted."""
_AT_ONCE = 2**20
"""Random numbers in memory at a time."""
_EQUAL = 1e-9
"""Numbers closer than this, relative to their size, are equal: sums of floats round."""


@dataclass(frozen=True)
class MeanScore:
    """The mean score of the `n` prompts that have one, with its 95% interval.

    The interval is None if fewer than two prompts have a score, or all scores are equal: the
    bootstrap cannot estimate their spread.
    """

    score: float | None
    n: int
    ci95: tuple[float, float] | None


def mean_score(scores: np.ndarray) -> float | None:
    """Mean score; None if no prompt has one."""
    found = _known(_of_prompts(scores))
    return float(found.mean()) if len(found) else None


def measure_scores(scores: np.ndarray) -> MeanScore:
    """Mean score with the interval of `mean_interval`, which takes seconds for many prompts."""
    found = _known(_of_prompts(scores))
    return MeanScore(score=mean_score(scores), n=len(found), ci95=_interval(found))


def compare_scores(before: np.ndarray, after: np.ndarray) -> PairedChange:
    """Change from `before` to `after`, on the prompts that have a score in both."""
    assert before.shape == after.shape, (before.shape, after.shape)
    found = _known(_of_prompts(after) - _of_prompts(before))
    if not len(found):
        return PairedChange()
    p, test = sign_flip_test(found)
    return PairedChange(
        difference=float(found.mean()),
        ci95=_interval(found),
        p=p,
        test=test,
        gained=int((found > 0).sum()),
        lost=int((found < 0).sum()),
        n=len(found),
    )


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of `n` values, not all equal: the expanded BCa bootstrap.

    BCa (Efron, J. Am. Stat. Assoc. 82, 1987, 171-185) takes quantiles of the resampled means,
    corrected for bias and skewness. The nominal tails are those of a t-distribution with n - 1
    degrees of freedom, widened by sqrt(n / (n - 1)): without it intervals of few values are too
    narrow (Hesterberg, The American Statistician 69, 2015, 371-386; as `CI.bca` of R's `resample`).
    """
    # Imported late: takes a second, and most runs have only shares of right answers.
    from scipy.stats import DegenerateDataWarning, bootstrap

    n, center = len(values), float(values.mean())
    # Relative to the largest one: powers of very large or small numbers are not floats.
    unit = float(np.abs(values - center).max())
    errors = (values - center) / unit
    reach = sqrt(n / (n - 1)) * stdtrit(n - 1, (1 + LEVEL) / 2)
    with warnings.catch_warnings():
        # Without a finite quantile a bound is the outermost value.
        warnings.simplefilter("ignore", (RuntimeWarning, DegenerateDataWarning))
        low, high = bootstrap(
            [errors],
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=float(2 * ndtr(reach) - 1),
            batch=max(1, _AT_ONCE // n),
            rng=_SEED,
        ).confidence_interval
    bounds = np.where(np.isnan([low, high]), [errors.min(), errors.max()], [low, high])
    return center + unit * float(bounds[0]), center + unit * float(bounds[1])


def sign_flip_test(differences: np.ndarray) -> tuple[float, str]:
    """Two-sided p-value of Fisher's paired randomization test, and the name of the test.

    Without a change each difference could have either sign; p is the share of the choices of signs
    whose sum is at least as far from 0. Differences of 0 have no influence. All choices are counted
    for up to `MOST_SIGNS` other differences: with differences of -1, 0 and 1 this is McNemar's
    exact test. For more, `DRAWS` random choices are; the observed one is counted as one more, so
    that p is never 0 and the test is valid (Phipson and Smyth, Stat. Appl. Genet. Mol. Biol. 9,
    2010, article 39).

    Args:
        differences: float `n`.
    """
    sizes = np.abs(differences[differences != 0])
    observed = abs(float(differences.sum())) - _EQUAL * float(sizes.sum())
    if len(sizes) <= MOST_SIGNS:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums - size, sums + size])
        return float((np.abs(sums) >= observed).mean()), "sign flips, exact"
    rng, far = np.random.default_rng(_SEED), 0
    at_once = max(1, _AT_ONCE // len(sizes))
    for start in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - start)
        signs = rng.integers(0, 2, (count, len(sizes)), dtype=np.int8)
        sums = 2 * (signs @ sizes) - sizes.sum()
        far += int((np.abs(sums) >= observed).sum())
    return (far + 1) / (DRAWS + 1), f"sign flips, {DRAWS} draws"


def _of_prompts(scores: np.ndarray) -> np.ndarray:
    """Each prompt's score: float `prompts`, NaN where no sample has one."""
    has = ~np.isnan(scores)
    count = has.sum(axis=1)
    totals = np.where(has, scores, 0.0).sum(axis=1)
    return np.where(count, totals / np.maximum(count, 1), np.nan)


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _interval(values: np.ndarray) -> tuple[float, float] | None:
    if len(values) < 2 or np.ptp(values) <= _EQUAL * np.abs(values).max():
        return None
    return mean_interval(values)
