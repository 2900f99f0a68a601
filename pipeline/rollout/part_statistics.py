"""Statistics of reward parts and completions over the rollouts of a step.

Values of parts are float64 `parts rollouts`, NaN where a rollout has none. The rollouts of a group
follow each other. A statistic that is not defined, such as the correlation with a constant, is None
or left out: it is not zero.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from scipy.special import stdtrit

_REPEATED = 4
"""Tokens of the n-grams whose repetition is measured."""


class Groups:
    """Reductions over groups.

    Args:
        names: the group of each rollout.
    """

    def __init__(self, names: Sequence[Hashable]) -> None:
        changes = [n for n, name in enumerate(names) if n == 0 or name != names[n - 1]]
        self._starts = np.array(changes, int)
        self._sizes = np.diff([*changes, len(names)])

    def spread(self, values: np.ndarray) -> list[float | None]:
        """Mean over groups of the standard deviation of each part's values, one for each part.

        Groups with fewer than two values of a part are left out.
        """
        counts = self.sums(~np.isnan(values))
        with np.errstate(divide="ignore", invalid="ignore"):
            stds = np.sqrt(self.sums(np.nan_to_num(self.centered(values)) ** 2) / counts)
        return [
            float(own[count >= 2].mean()) if (count >= 2).any() else None
            for own, count in zip(stds, counts, strict=True)
        ]

    def ratio(self, sums: np.ndarray, counts: np.ndarray) -> tuple[float | None, float | None]:
        """A mean, sum of `sums` / sum of `counts`, and half the width of its 95% interval.

        Rollouts of a group are alike, groups are independent: the interval is Student's for a ratio
        of sums over groups, linearized (Cochran, "Sampling Techniques", 1977, section 6). As a few
        groups can agree by chance, it is at least as wide as if rollouts were independent. None:
        nothing is counted; fewer than two groups count.

        Args:
            sums: what a rollout adds to the sum: `rollouts`.
            counts: what it adds to the count.
        """
        total = counts.sum()
        if not total:
            return None, None
        mean = sums.sum() / total
        residuals, known = self.sums(np.array([sums - mean * counts, counts > 0]))
        groups, rollouts = int((known > 0).sum()), int(known.sum())
        if groups < 2:
            return float(mean), None
        between = (residuals**2).sum() * groups / (groups - 1)
        single = ((sums - mean * counts) ** 2).sum() * rollouts / (rollouts - 1)
        error = np.sqrt(max(between, single)) / total
        return float(mean), float(stdtrit(groups - 1, 0.975) * error)

    def centered(self, values: np.ndarray) -> np.ndarray:
        """Values minus the mean of their group, exactly 0 in groups of equal values."""
        known = ~np.isnan(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = self.sums(np.where(known, values, 0.0)) / self.sums(known)
            lowest = np.fmin.reduceat(values, self._starts, axis=1)
            equal = lowest == np.fmax.reduceat(values, self._starts, axis=1)
        # The mean of equal values may differ from them in its last bit.
        centers = np.where(equal, lowest, means)
        return values - np.repeat(centers, self._sizes, axis=1)

    def all(self, mask: np.ndarray) -> int:
        """Number of groups in which the mask, bool `rollouts`, is true for each rollout."""
        return int(np.logical_and.reduceat(mask, self._starts).sum())

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over each group: float64 `parts groups`."""
        return np.add.reduceat(values.astype(float), self._starts, axis=1)


def correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    """Pearson's correlation of two series where both have values; None if one is constant."""
    both = ~(np.isnan(one) | np.isnan(other))
    one, other = one[both], other[both]
    if len(one) < 2 or one.min() == one.max() or other.min() == other.max():
        return None
    one, other = one - one.mean(), other - other.mean()
    return float((one @ other) / np.sqrt((one @ one) * (other @ other)))


def repetition(tokens: np.ndarray) -> float | None:
    """Share of a completion's 4-grams of tokens that repeat an earlier one: 0 without repetition.

    seq-rep-4 = 1 - |distinct 4-grams| / |4-grams| (Welleck et al. 2020, "Neural text generation
    with unlikelihood training", arXiv:1908.04319). None: fewer than four tokens.
    """
    listed = tokens.tolist()
    grams = list(zip(*(listed[start:] for start in range(_REPEATED)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else None
