"""What may change between a run and its resumption without making it another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Change = tuple[str, object, object]
"""A dotted key, its old value and its new one; None where the key is not set."""

# Everything else alters what is sampled, learned or measured. These only say when the run ends and
# how, what is written beside it, how fast rewards are computed and how many may fail, what it
# costs, and what may be used of a device, whose consequences are decisions that the journal has.
# `budget.steps` is also the default end of the learning rate's decay: `altering_changes` sees to
# that.
FREE_TABLES = ("budget", "checkpoint", "export", "wandb", "records")
FREE_KEYS = (
    "run.dir",
    "rewards.workers",
    "rewards.timeout_s",
    "rewards.max_excluded_share",
    "rollout.min_prompts_per_step",
    "plan.hbm_gib",
    "plan.chip_hour_usd",
    "plan.calibration_share",
)
# Sizes that were fixed may be let go: what becomes of them are decisions, too. Not the other way:
# the run may have other ones by then.
FREE_CHANGES: tuple[Change, ...] = (("plan.fixed", True, False),)


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every key in which two resolved configurations differ, in the order of `new`.

    Tables in lists are compared element by element, other lists as a whole. A missing key equals
    one that is None.
    """
    before, after = dict(_flatten(old)), dict(_flatten(new))
    return [
        (key, before.get(key), after.get(key))
        for key in {**after, **before}
        if before.get(key) != after.get(key)
    ]


def altering_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The differences that would make a resumed run another run, as `diff_configs` tells them.

    A decay that ends with `budget.steps` moves when the budget does: that is told as a change of
    `learner.decay_steps`, and setting `learner.decay_steps` to the old budget is no change.
    """
    changes = diff_configs(_with_decay_end(old), _with_decay_end(new))
    return [change for change in changes if not _is_free(change[0]) and change not in FREE_CHANGES]


def _is_free(key: str) -> bool:
    return key.partition(".")[0] in FREE_TABLES or key in FREE_KEYS


def _with_decay_end(config: Mapping[str, Any]) -> dict[str, Any]:
    learner = dict(config["learner"])
    if learner["schedule"] != "constant":
        learner["decay_steps"] = learner["decay_steps"] or config["budget"]["steps"]
    return {**config, "learner": learner}


def _flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(item, f"{prefix}.{index}")
    else:
        yield prefix, value
