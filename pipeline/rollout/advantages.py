"""Group advantages: the reward of a rollout relative to its group.

Rollouts without a reward are ignored: their advantage is 0, and they do not change those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from configs.learner import Advantage

# The value of Tunix.
EPSILON = 1e-6


def group_advantages(rewards: Sequence[float | None], *, kind: Advantage) -> np.ndarray:
    """Advantages of the rollouts of a group: float32 `group`.

    With mean m and sample standard deviation s (n - 1 in the denominator) over a group's rewards:

        grpo:     (r - m) / (s + 1e-6)      arXiv:2402.03300, 4.1.2; s as in Tunix 0.1.7 and TRL
        dr_grpo:   r - m                    arXiv:2503.20783, 3.2
        rloo:     (r - m) n / (n - 1)       r minus the mean of the others; arXiv:2402.14740, 2.2

    They are 0 where the reward is None, and everywhere if fewer than two rewards differ. Rewards
    near the limits of float64 have advantages that are not finite.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    advantages, valid = np.zeros(len(rewards), np.float32), ~np.isnan(values)
    scores = values[valid]
    # The mean of equal rewards may differ from them in its last bit.
    if len(scores) > 1 and scores.min() < scores.max():
        with np.errstate(over="ignore", invalid="ignore"):
            spread = scores.std()
            advantages[valid] = _ADVANTAGES[kind](scores) if np.isfinite(spread) else np.nan
    return advantages


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
