"""Confidence intervals of mean scores, and paired comparison of two of them.

For metrics with real values; `significance` has the intervals and tests of shares of right answers.

Scores are float arrays `prompts samples`, NaN where an answer has none, with the same prompts in
the same order before and after. Samples of one prompt are not independent, so the unit of analysis
is the prompt: its score is the mean of its samples that have one, and a prompt without such samples
is left out. Intervals are 95% intervals; p-values are two-sided. All random numbers have a fixed
seed: equal scores give equal results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from pipeline.evaluate.significance import LEVEL

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
    """The mean score of the prompts.

    Attributes:
        score: the mean; None if no prompt has a score.
        n: number of prompts with a score.
        ci95: 95% interval of the mean; None if fewer than two prompts have a score, or all scores
            are equal: the bootstrap cannot estimate their spread.
    """

    score: float | None
    n: int
    ci95: tuple[float, float] | None


@dataclass(frozen=True)
class ScoreChange:
    """The change of the scores of the prompts that have one before and after.

    Attributes:
        difference: mean of the differences, after minus before; None without such prompts.
        ci95: 95% interval of the difference; None as in `MeanScore`.
        p: p-value of the null hypothesis that nothing changed; None without such prompts.
        test: name of the test.
        gained: number of prompts with a higher score than before.
        lost: number of prompts with a lower one.
        n: number of prompts.
    """

    difference: float | None
    ci95: tuple[float, float] | None
    p: float | None
    test: str
    gained: int
    lost: int
    n: int


def mean_score(scores: np.ndarray) -> float | None:
    """Mean score; None if no prompt has one."""
    found = _known(_of_prompts(scores))
    return float(found.mean()) if len(found) else None


def measure_scores(scores: np.ndarray) -> MeanScore:
    """Mean score with the interval of `mean_interval`, which takes seconds for many prompts."""
    found = _known(_of_prompts(scores))
    return MeanScore(score=mean_score(scores), n=len(found), ci95=_interval(found))


def compare_scores(before: np.ndarray, after: np.ndarray) -> ScoreChange:
    """Change from `before` to `after`, on the prompts that have a score in both.

    The interval is that of `mean_interval` for the prompts' differences, the p-value that of
    `sign_flip_test`.

    Raises:
        ValueError: if they have different shapes.
    """
    if before.shape != after.shape:
        raise ValueError(
            f"scores of shapes {before.shape} before and {after.shape} after are no pairs"
        )
    found = _known(_of_prompts(after) - _of_prompts(before))
    p, test = sign_flip_test(found) if len(found) else (None, "none")
    return ScoreChange(
        difference=float(found.mean()) if len(found) else None,
        ci95=_interval(found),
        p=p,
        test=test,
        gained=int((found > 0).sum()),
        lost=int((found < 0).sum()),
        n=len(found),
    )


def mean_interval(values: np.ndarray) -> np.ndarray:
    """95% intervals of the means of samples: the expanded BCa bootstrap.

    BCa (Efron, J. Am. Stat. Assoc. 82, 1987, 171-185) takes quantiles of the resampled means,
    corrected for bias and skewness; the acceleration is that of the jackknife. The interval lies
    within the range of the values. The nominal tails are those of a t-distribution with n - 1
    degrees of freedom, widened by sqrt(n / (n - 1)): without it intervals of few values are too
    narrow (Hesterberg, The American Statistician 69, 2015, 371-386; as `CI.bca` of R's `resample`).

    Args:
        values: float `samples n`; n at least 2, the values of a sample not all equal.

    Returns:
        float `samples 2`: lower and upper bounds.
    """
    n = values.shape[1]
    centers = values.mean(axis=1, keepdims=True)
    # Relative to the largest one: powers of very large or small numbers are not floats.
    unit = np.abs(values - centers).max(axis=1, keepdims=True)
    errors = (values - centers) / unit
    resampled = np.sort(_resampled_means(errors), axis=1)
    # Ties count half: means of equal resamples differ in their last bits.
    below, upto = ((resampled <= bound).mean(axis=1) for bound in (-_EQUAL, _EQUAL))
    bias = ndtri(np.clip((below + upto) / 2, 0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES))[:, None]
    skew = (errors**3).sum(axis=1, keepdims=True)
    acceleration = skew / (6 * (errors**2).sum(axis=1, keepdims=True) ** 1.5)
    reach = sqrt(n / (n - 1)) * stdtrit(n - 1, (1 + LEVEL) / 2)
    shifted = bias + np.array([[-reach, reach]])
    # Beyond 1 / acceleration the correction changes its sign: the outermost quantile is meant.
    left = 1 - acceleration * shifted
    score = np.where(
        left > 0, bias + shifted / np.where(left > 0, left, 1), np.copysign(np.inf, shifted)
    )
    ranks = np.clip(ndtr(score) * (RESAMPLES + 1) - 1, 0, RESAMPLES - 1)
    low = np.floor(ranks).astype(int)
    high = np.minimum(low + 1, RESAMPLES - 1)
    take = np.take_along_axis
    lower, upper = take(resampled, low, axis=1), take(resampled, high, axis=1)
    return np.asarray(centers + unit * (lower + (ranks - low) * (upper - lower)))


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
    for count in _chunks(DRAWS, width=len(sizes)):
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
    ((low, high),) = mean_interval(values[None]).tolist()
    return low, high


def _resampled_means(values: np.ndarray) -> np.ndarray:
    """Means of `RESAMPLES` resamples, the same ones for each sample: float `samples resamples`."""
    n, rng = values.shape[1], np.random.default_rng(_SEED)
    means = []
    for count in _chunks(RESAMPLES, width=n):
        drawn = rng.integers(0, n, (count, n)) + n * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n)
        means.append(values @ (times.T / n))
    return np.concatenate(means, axis=1)


def _chunks(total: int, *, width: int) -> list[int]:
    """Parts of `total` rows with at most `_AT_ONCE` numbers each."""
    most = max(1, _AT_ONCE // width)
    return [min(most, total - start) for start in range(0, total, most)]
