"""Evaluations of a run, those of earlier processes included, as its journal records them.

`since` names an event: what was recorded before the last one does not count. With a reward metric
that is a change of the rewards, because scores by other rewards are not comparable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema import Config
from pipeline.evaluate.summary import mean_key, mean_of, show_mean
from pipeline.run.history import REWARDS_CHANGED
from pipeline.run.run_folder import RunFolder


def comparable_since(config: Config) -> str | None:
    """The event after which evaluations are comparable; None: all are."""
    return REWARDS_CHANGED if config.uses_rewards else None


def last_entry(folder: RunFolder, name: str, *, since: str | None) -> dict[str, Any] | None:
    """The last journal entry of an evaluation, whose answers are in its file; None: there is none.

    A later resume does not undo it: its `adapter_sha256` says what was evaluated.
    """
    found = None
    for entry in folder.entries():
        if entry["event"] == since:
            found = None
        elif entry["event"] == "evaluated" and entry["name"] == name:
            found = entry
    return found


def best_facts(best: Mapping[str, Any], last: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The best validation compared with the last one: for `summary.json`, and in words.

    An earlier process may have recorded its mean under another key than the last one.
    """
    key, at, end = mean_key(best), best["step"], last["step"]
    mean, last_mean = mean_of(best), mean_of(last)
    facts = {"step": at, key: mean, "last_step": end, f"last_{key}": last_mean}
    text = f"best by validation: step {at} with {show_mean(best)}; "
    text += f"the last, step {end}, has {show_mean(last)}"
    if _has_more_reward(best, last) and mean == last_mean:
        text += f"; its mean reward is {best['reward']:.3f}, not {last['reward']:.3f}"
    return facts, text


def is_better(found: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Whether a validation is better than the best one: by the metric, then by the mean reward.

    Mean rewards are compared only if the rewards did not change in between.

    Args:
        found: its mean as in a summary, `reward` and `rewards_version`.
        best: the journal entry of the best one; None: there is none.
    """
    mean = mean_of(found)
    if mean is None or best is None:
        return mean is not None
    best_mean = mean_of(best)
    assert best_mean is not None
    return mean > best_mean or (mean == best_mean and _has_more_reward(found, best))


def _has_more_reward(found: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    reward, best_reward = found.get("reward"), best.get("reward")
    if found.get("rewards_version", 0) != best.get("rewards_version", 0):
        return False
    return reward is not None and best_reward is not None and reward > best_reward
