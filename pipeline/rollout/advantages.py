"""Group advantages: the reward of a rollout relative to its group.

Rollouts without a reward are ignored: their advantage is 0, and they do not change those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.learner import Advantage

# The value of Tunix.
EPSILON = 1e-6


@dataclass(frozen=True)
class GroupStats:
    """Counts of groups by kind.

    Attributes:
        mixed: groups with different rewards, the only ones with a policy gradient.
        all_equal: groups of two or more equal rewards, or rewards so close that their advantages
            are 0 in float32.
        short: groups with fewer than two rewards.
    """

    mixed: int
    all_equal: int
    short: int


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, kind: Advantage
) -> tuple[list[np.ndarray], GroupStats]:
    """Advantages of rollouts in groups.

    With mean m and sample standard deviation s (n - 1 in the denominator) over a group's rewards:

        grpo:     (r - m) / (s + 1e-6)      arXiv:2402.03300, 4.1.2; s as in Tunix 0.1.7 and TRL
        dr_grpo:   r - m                    arXiv:2503.20783, 3.2
        rloo:     (r - m) n / (n - 1)       r minus the mean of the others; arXiv:2402.14740, 2.2

    They are 0 where the reward is None and in groups that are not mixed.

    Args:
        rewards: finite rewards of each group; None for a rollout without a reward.
        kind: the formula.

    Returns:
        float32 `group` for each group, and the counts of groups.
    """
    advantages = []
    counts = dict.fromkeys(("mixed", "all_equal", "short"), 0)
    for group in rewards:
        values = np.array([np.nan if reward is None else reward for reward in group], np.float64)
        advantage, valid = np.zeros(len(group), np.float32), ~np.isnan(values)
        scores = values[valid]
        if len(scores) < 2:
            counts["short"] += 1
        else:
            advantage[valid] = found = _of_group(scores, kind)
            counts["mixed" if found.any() else "all_equal"] += 1
        advantages.append(advantage)
    return advantages, GroupStats(**counts)


def _of_group(scores: np.ndarray, kind: Advantage) -> np.ndarray:
    """Advantages of two or more rewards, float32 `group`; not finite if they overflow."""
    if scores.min() == scores.max():  # their mean may differ from them in its last bit
        return np.zeros(len(scores), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return _ADVANTAGES[kind](scores).astype(np.float32)


def _grpo(scores: np.ndarray) -> np.ndarray:
    return _dr_grpo(scores) / (scores.std(ddof=1) + EPSILON)


def _dr_grpo(scores: np.ndarray) -> np.ndarray:
    return scores - scores.mean()


def _rloo(scores: np.ndarray) -> np.ndarray:
    return _dr_grpo(scores) * len(scores) / (len(scores) - 1)


_ADVANTAGES: dict[Advantage, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}
