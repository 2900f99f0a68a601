"""Evaluations of a run, those of earlier processes included, as its journal records them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.evaluate.summary import mean_key, mean_of, show_mean
from pipeline.run.history import Entry, rewards_version, valid_entries


def evaluations(journal: Iterable[Entry], *, uses_rewards: bool) -> list[Entry]:
    """The entries of evaluations that count, oldest first.

    If the metric is a reward (`uses_rewards`), those by former rewards do not: they do not compare.
    """
    entries = list(journal)
    found, version = valid_entries(entries, {"evaluated"}), rewards_version(entries)
    return [one for one in found if not uses_rewards or one["rewards_version"] == version]


def best_facts(best: Mapping[str, Any], last: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The best validation compared with the last one: for `summary.json`, and in words."""
    key, at, end = mean_key(best), best["step"], last["step"]
    facts = {"step": at, key: mean_of(best), "last_step": end, f"last_{key}": mean_of(last)}
    shown = f"best by validation: step {at} with {show_mean(best)}"
    return facts, f"{shown}; the last, step {end}, has {show_mean(last)}"


def best_of(validations: Iterable[Entry]) -> Entry | None:
    """The best validation, of equal ones the earliest; one without any score is none."""
    best = None
    for entry in validations:
        if is_better(entry, best):
            best = entry
    return best


def is_better(found: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Whether a validation is better than the best one: by the metric, then by the mean reward.

    Mean rewards are compared only if the rewards did not change in between. `found` has its mean as
    in a summary, `reward` and `rewards_version`, as has the journal entry of the best one.
    """
    mean = mean_of(found)
    if mean is None or best is None:
        return mean is not None
    if mean != (best_mean := mean_of(best)):
        assert best_mean is not None
        return mean > best_mean
    if found.get("rewards_version", 0) != best.get("rewards_version", 0):
        return False
    reward, best_reward = found.get("reward"), best.get("reward")
    return reward is not None and best_reward is not None and reward > best_reward
