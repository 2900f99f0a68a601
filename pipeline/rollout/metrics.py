"""Metrics of a step's rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.contracts.rollouts import Rollout
from pipeline.rollout.advantages import GroupStats


def step_metrics(rollouts: Sequence[Rollout], stats: GroupStats) -> dict[str, float]:
    """Metrics of rewards, groups and lengths. Means are over rollouts that have the value.

    A mixture adds metrics of each source: `reward/SOURCE/mean` beside `reward/mean`. Without
    rollouts there are only the group counts.
    """
    groups = {
        "groups/mixed": float(stats.mixed),
        "groups/all_equal": float(stats.all_equal),
        "groups/short": float(stats.short),
        "groups/excluded_rollouts": float(stats.excluded),
        "groups/overflow": float(stats.overflow),
    }
    if not rollouts:
        return groups
    lengths = [len(rollout.completion.tokens) for rollout in rollouts]
    reasons = [rollout.completion.stop_reason for rollout in rollouts]
    metrics = _reward_metrics(rollouts, "reward")
    for source in sorted({rollout.source for rollout in rollouts if rollout.source is not None}):
        own = [rollout for rollout in rollouts if rollout.source == source]
        metrics |= _reward_metrics(own, f"reward/{source}")
        metrics |= {
            f"rollout/{source}/count": float(len(own)),
            f"rollout/{source}/tokens_mean": _mean([len(r.completion.tokens) for r in own]),
        }
    return {
        **metrics,
        **groups,
        "rollout/tokens_mean": _mean(lengths),
        "rollout/tokens_max": float(max(lengths)),
        "rollout/ended_share": _mean([reason != "length" for reason in reasons]),
        "rollout/stop_string_share": _mean([reason == "stop_string" for reason in reasons]),
    }


@np.errstate(over="ignore", invalid="ignore")
def _reward_metrics(rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """Means over rollouts with a reward; means of a part over rollouts with a score of that part.

    A mean over nothing is left out: an error is not a zero.
    """
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = {f"{prefix}/excluded_share": 1 - len(rewards) / len(rollouts)}
    if rewards:
        metrics |= {f"{prefix}/mean": _mean(rewards), f"{prefix}/std": float(np.std(rewards))}
    for name in rollouts[0].rewards:
        values = [rollout.rewards[name] for rollout in rollouts]
        scored = [value for value in values if value is not None]
        if scored:
            metrics[f"{prefix}/{name}"] = _mean(scored)
        metrics[f"{prefix}/{name}_errors"] = float(len(values) - len(scored))
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
