"""Confidence intervals of accuracies, and paired comparison of two accuracies.

Answers are bool arrays `prompts samples`, or `prompts` with one sample each, with the same prompts
in the same order before and after; at least one. Samples of one prompt are not independent, so the
unit of analysis is the prompt. Intervals are 95% intervals; p-values are two-sided.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers to `n` prompts, with its 95% interval."""

    accuracy: float
    n: int
    ci95: tuple[float, float]


@dataclass(frozen=True)
class PairedChange:
    """The change of accuracies or scores of the same `n` prompts; None without any.

    Attributes:
        difference: mean of the differences, after minus before.
        ci95: its 95% interval; of scores as in `score_statistics.MeanScore`.
        p: p-value of the null hypothesis that nothing changed, by the named test.
        gained: number of prompts with more right answers, or a higher score, than before.
        lost: number of prompts with fewer, or a lower one.
    """

    difference: float | None = None
    ci95: tuple[float, float] | None = None
    p: float | None = None
    test: str = "none"
    gained: int = 0
    lost: int = 0
    n: int = 0


def measure_accuracy(correct: np.ndarray) -> Accuracy:
    """Accuracy with Wilson's score interval (J. Am. Stat. Assoc. 22, 1927).

    With several samples per prompt the interval is Wilson's for the effective number of answers:
    the number of independent answers with the variance found between the prompts' means (Kish's
    design effect; Franco et al., J. Survey Stat. Methodol. 7, 2019, 334-364), bounded by the
    numbers of prompts and of answers.
    """
    means, samples = _means(correct)
    share = float(means.mean())
    effective = _effective(means, samples=samples)
    return Accuracy(accuracy=share, n=len(means), ci95=_wilson(share, effective))


def compare_paired(before: np.ndarray, after: np.ndarray) -> PairedChange:
    """Change from `before` to `after`.

    With one sample per prompt the interval is Newcombe's method 10 (Statistics in Medicine 17,
    1998, 2635-2650): Wilson intervals of both shares, squared and added with the correlation of the
    pairs. The p-value is McNemar's exact one: the probability that a fair coin splits the changed
    prompts at least as unevenly.

    With several samples the same is done with the prompts' means: their intervals are those of
    `measure_accuracy`, squared and added with the correlation of the means (MOVER; Zou and Donner,
    Statistics in Medicine 27, 2008, 1693-1702). The p-value is that of Fisher's paired
    randomization test (see `score_statistics.sign_flip_test`), exact, not sampled (Pagano and
    Tritchler, J. Am. Stat. Assoc. 78, 1983, 435-440); with one sample per prompt it is McNemar's.
    """
    assert before.shape == after.shape, (before.shape, after.shape)
    before_means, samples = _means(before)
    after_means, _ = _means(after)
    risen = np.rint((after_means - before_means) * samples).astype(np.int64)
    gained, lost = int((risen > 0).sum()), int((risen < 0).sum())
    if samples == 1:
        test, correlation = "McNemar, exact", _phi(before_means > 0, after_means > 0)
    else:
        test = "paired randomization, exact"
        correlation = _correlation(before_means, after_means)
    return PairedChange(
        difference=int(risen.sum()) / risen.size / samples,
        ci95=_difference(
            (float(after_means.mean()), measure_accuracy(after).ci95),
            (float(before_means.mean()), measure_accuracy(before).ci95),
            correlation=correlation,
        ),
        p=_flips(risen),
        test=test,
        gained=gained,
        lost=lost,
        n=len(risen),
    )


def pass_at(correct: np.ndarray, k: int) -> float:
    """The probability that at least one of `k` samples is right, mean over the prompts.

    Unbiased (Chen et al., arXiv:2107.03374): for a prompt with c right samples of n, at least `k`,
    it is 1 - C(n - c, k) / C(n, k). `correct` is bool `prompts samples`.
    """
    samples = correct.shape[1]
    assert 1 <= k <= samples, (k, samples)
    none = [comb(samples - int(right), k) / comb(samples, k) for right in correct.sum(axis=1)]
    return 1.0 - float(np.mean(none))


def _means(correct: np.ndarray) -> tuple[np.ndarray, int]:
    """Each prompt's share of right answers, float64 `prompts`, and its number of samples."""
    assert correct.dtype == np.bool_, correct.dtype
    assert correct.size
    rows = correct.reshape(len(correct), -1)
    return rows.mean(axis=1), rows.shape[1]


def _effective(means: np.ndarray, *, samples: int) -> float:
    """Effective number of answers: independent ones that would give the same variance."""
    n, share = len(means), float(means.mean())
    between = float(means.var(ddof=1)) if n > 1 else 0.0
    if samples == 1 or between == 0.0:
        # Equal means: all answers are equal, or too few prompts to estimate the variance.
        return float(n)
    return float(np.clip(n * share * (1 - share) / between, n, n * samples))


def _flips(risen: np.ndarray) -> float:
    """Two-sided p-value of the paired randomization test on integer differences."""
    sizes = np.abs(risen[risen != 0])
    reach = int(sizes.sum())
    # chance[s]: probability that the positive differences sum to s if all signs are equally likely.
    chance = np.zeros(reach + 1)
    chance[0] = 1.0
    for size in sizes:
        chance[size:] += chance[: reach + 1 - size].copy()
        chance *= 0.5
    positive = int(risen[risen > 0].sum())
    far = max(positive, reach - positive)
    if 2 * far == reach:
        return 1.0
    return min(2.0 * float(chance[far:].sum()), 1.0)


def _phi(before: np.ndarray, after: np.ndarray) -> float:
    """Correlation of the two answers to a prompt, with Newcombe's continuity correction."""
    n = len(before)
    both, neither = int((before & after).sum()), int((~before & ~after).sum())
    gained, lost = int((~before & after).sum()), int((before & ~after).sum())
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    association = both * neither - gained * lost
    corrected = association if association < 0 else max(association - n / 2, 0.0)
    return corrected / sqrt(margins) if margins else 0.0


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    if one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _difference(
    first: tuple[float, tuple[float, float]],
    second: tuple[float, tuple[float, float]],
    *,
    correlation: float,
) -> tuple[float, float]:
    """Interval of the first share minus the second one, from the intervals of both."""
    share1, (low1, high1) = first
    share2, (low2, high2) = second

    def reach(one: float, other: float) -> float:
        return sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0))

    difference = share1 - share2
    # Rounding may exceed the range of a difference of shares by an ulp.
    return (
        max(difference - reach(share1 - low1, high2 - share2), -1.0),
        min(difference + reach(high1 - share1, share2 - low2), 1.0),
    )


def _wilson(share: float, n: float) -> tuple[float, float]:
    shrink = 1 + _Z**2 / n
    middle = (share + _Z**2 / (2 * n)) / shrink
    half = _Z * sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2)) / shrink
    # Rounding must not put the share outside its interval: at 0 the lower bound would be 1e-17.
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)
