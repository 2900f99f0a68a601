"""Metrics of a step's rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contracts.rollouts import Rollout
from pipeline.rollout.advantages import GroupStats
from pipeline.run.records import (
    _mean,
    _reward_metrics,
)


def step_metrics(rollouts: Sequence[Rollout], stats: GroupStats) -> dict[str, float]:
    """What a step's rollouts were like. Means are over rollouts that have the value.

    In a mixture those of each source are there too: `reward/SOURCE/mean` beside `reward/mean`.
    Without any rollout there are only numbers of groups.
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
