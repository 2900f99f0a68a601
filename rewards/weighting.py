"""Combines the parts of a reward, and shuffles rewards for the control experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from rewards.base import Outcome


def combine(parts: Mapping[str, Outcome], *, weights: Mapping[str, float]) -> float | None:
    """Weighted sum of the parts that apply.

    None if a part with non-zero weight failed, or if none of them applies. Parts of weight 0 are
    recorded only and do not affect the reward. The sum may overflow to infinity, or to NaN if
    infinities of both signs are added.
    """
    assert parts.keys() == weights.keys(), (sorted(parts), sorted(weights))
    total, applies = 0.0, not any(weights.values())
    for name, outcome in parts.items():
        if not weights[name]:
            continue
        if outcome.error is not None:
            return None
        if outcome.value is not None:
            total += weights[name] * outcome.value
            applies = True
    return total if applies else None


def shuffle_rewards(rewards: Sequence[float | None], *, seed: int, step: int) -> list[float | None]:
    """Permutes a step's rewards over the rollouts that have one.

    The control experiment: the same rewards, but independent of the rollouts. The permutation is a
    function of (seed, step) and of which rollouts have a reward.
    """
    scored = [index for index, reward in enumerate(rewards) if reward is not None]
    # Python hashes a string seed with SHA-512, which is equal on all machines.
    targets = Random(f"shuffle_rewards/{seed}/{step}").sample(scored, len(scored))
    shuffled = list(rewards)
    for source, target in zip(scored, targets, strict=True):
        shuffled[target] = rewards[source]
    return shuffled
