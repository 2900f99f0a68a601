"""From the parts of a reward to the reward, and the control experiment that destroys it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random


def combine(parts: Mapping[str, float | None], *, weights: Mapping[str, float]) -> float | None:
    """Weighted sum of the parts; None if one of them has a weight but no value.

    Parts of weight 0 are observed only: they change nothing. The sum may overflow to infinity, or
    to NaN where infinities of both signs meet.
    """
    if parts.keys() != weights.keys():
        raise ValueError(f"reward parts {sorted(parts)} but weights for {sorted(weights)}")
    total = 0.0
    for name, value in parts.items():
        if not weights[name]:
            continue
        if value is None:
            return None
        total += weights[name] * value
    return total


def shuffle_rewards(rewards: Sequence[float | None], *, seed: int, step: int) -> list[float | None]:
    """Permute a step's rewards over the rollouts that have one; those without stay without.

    The control experiment: the same rewards, but saying nothing about the rollouts. The
    permutation is a function of (seed, step) and of which rollouts have a reward.
    """
    scored = [index for index, reward in enumerate(rewards) if reward is not None]
    # A string as seed: Python hashes it with SHA-512, the same on every machine.
    targets = Random(f"shuffle_rewards/{seed}/{step}").sample(scored, len(scored))
    shuffled = list(rewards)
    for source, target in zip(scored, targets, strict=True):
        shuffled[target] = rewards[source]
    return shuffled
