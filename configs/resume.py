"""Which settings may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.settings import find_setting

Change = tuple[str, object, object]
"""A dotted key, its old value and its new value; None if the key is not set."""

# All other settings alter what is sampled, trained or measured. The free ones set when and how the
# run ends, what is recorded, how fast rewards are computed, which alarms are raised, the price, and
# device memory limits, whose consequences are journaled decisions. `budget.steps` is also the
# default end of the learning rate's decay, which `altering_changes` handles.
FREE_TABLES = ("budget", "checkpoint", "export", "wandb", "records", "alarms")
FREE_KEYS = (
    "run.dir",
    "rewards.workers",
    "rewards.timeout_s",
    "rewards.memory_gib",
    "rollout.min_prompts_per_step",
    "plan.hbm_gib",
    "plan.chip_hour_usd",
    "plan.calibration_share",
)
# Fixed sizes may become planned ones: changes of planned sizes are journaled decisions. The reverse
# is refused: the run may have changed its sizes meanwhile.
FREE_CHANGES: tuple[Change, ...] = (("plan.fixed", True, False),)


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """All keys in which two resolved configurations differ, in the order of `new`.

    Tables in lists are compared element by element, other lists as a whole. A missing key equals
    None.
    """
    before, after = dict(_flatten(old)), dict(_flatten(new))
    return [
        (key, before.get(key), after.get(key))
        for key in {**after, **before}
        if before.get(key) != after.get(key)
    ]


def altering_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The differences of `diff_configs` that are not allowed on a resume.

    A decay that ends at `budget.steps` changes with the budget: this is reported as a change of
    `learner.decay_steps`, and setting `learner.decay_steps` to the old budget is not a change.
    """
    changes = diff_configs(_with_decay_end(old), _with_decay_end(new))
    return [change for change in changes if not _is_free(change[0]) and change not in FREE_CHANGES]


def refuse_unknown_keys(saved: Mapping[str, Any], folder: Path) -> None:
    """Refuses the saved configuration of a run folder if it has keys that the schema lacks.

    Raises:
        ConfigError: naming the folder and these keys.
    """
    unknown = [key for key, _ in _flatten(saved) if find_setting(key.split(".")) is None]
    if unknown:
        raise ConfigError(
            f"{folder} was written by an earlier version of gemma-grpo (its config.json has "
            f"{', '.join(unknown)}); start another run with --run.name"
        )


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
