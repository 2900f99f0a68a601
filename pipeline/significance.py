"""How sure an accuracy or a difference of two accuracies on the same prompts is.

Answers are boolean arrays over prompts, in the same order before and after. What is stated are 95%
intervals and two-sided p-values.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.stats import binomtest

LEVEL = 0.95


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers with its Wilson score interval."""

    accuracy: float
    n: int
    ci95: tuple[float, float]


@dataclass(frozen=True)
class PairedChange:
    """What happened to the answers to the same prompts.

    Attributes:
        difference: accuracy after minus accuracy before.
        ci95: its interval.
        p: of McNemar's exact test that nothing changed.
        gained: prompts that were wrong and are right.
        lost: prompts that were right and are wrong.
        n: prompts.
    """

    difference: float
    ci95: tuple[float, float]
    p: float
    gained: int
    lost: int
    n: int


def measure_accuracy(correct: np.ndarray) -> Accuracy:
    """Accuracy with Wilson's score interval (J. Am. Stat. Assoc. 22, 1927).

    Raises:
        ValueError: if there are no answers.
    """
    _check(correct)
    right, n = int(correct.sum()), len(correct)
    return Accuracy(accuracy=right / n, n=n, ci95=_wilson(right, n))


def compare_paired(before: np.ndarray, after: np.ndarray) -> PairedChange:
    """Change from `before` to `after`.

    The interval is Newcombe's method 10 (Statistics in Medicine 17, 1998, 2635-2650): Wilson
    intervals of both shares, squared and added with the correlation of the pairs. Unlike Wald's it
    covers as promised also for shares near 0 and 1 and for few changes. The p-value is McNemar's
    exact one: the chance of a split of the changed prompts at least as uneven under a fair coin.

    Raises:
        ValueError: if there are no answers or not equally many.
    """
    _check(before)
    _check(after)
    if before.shape != after.shape:
        raise ValueError(f"{len(before)} answers before and {len(after)} after are no pairs")
    both, gained = int((before & after).sum()), int((~before & after).sum())
    lost, neither = int((before & ~after).sum()), int((~before & ~after).sum())
    changed = gained + lost
    return PairedChange(
        difference=(gained - lost) / len(before),
        ci95=_newcombe(both=both, first=gained, second=lost, neither=neither),
        p=float(binomtest(gained, changed).pvalue) if changed else 1.0,
        gained=gained,
        lost=lost,
        n=len(before),
    )


def _newcombe(*, both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """Interval of the first share minus the second one, from the counts of the paired table."""
    n = both + first + second + neither
    share1, share2 = (both + first) / n, (both + second) / n
    low1, high1 = _wilson(both + first, n)
    low2, high2 = _wilson(both + second, n)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    association = both * neither - first * second
    corrected = association if association < 0 else max(association - n / 2, 0.0)
    phi = corrected / sqrt(margins) if margins else 0.0

    def reach(one: float, other: float) -> float:
        return sqrt(max(one**2 - 2 * phi * one * other + other**2, 0.0))

    difference = share1 - share2
    return (
        difference - reach(share1 - low1, high2 - share2),
        difference + reach(high1 - share1, share2 - low2),
    )


def _wilson(right: int, n: int) -> tuple[float, float]:
    interval = binomtest(right, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def _check(correct: np.ndarray) -> None:
    if correct.dtype != np.bool_ or correct.ndim != 1 or len(correct) == 0:
        raise ValueError(
            f"answers are {correct.dtype} of shape {correct.shape}; expected bool `prompts`, "
            "at least one"
        )
