"""Which settings may change when a run is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.base import FREE, OnResume
from configs.errors import ConfigError
from configs.settings import find_setting, settings
from configs.task import RewardFunction
from configs.toml_text import show_value

Change = tuple[str, object, object]
"""A dotted key, its old value and its new value; None if the key is not set."""

_FREE_PART_KEYS = [
    key for key, field in RewardFunction.model_fields.items() if field.json_schema_extra == FREE
]
"""How fast a part is computed; the other settings of a part alter its rewards."""
_FUNCTIONS = "rewards.functions"
_DIGITS = 12
"""Digits of a hash that are shown."""
REWARDS = "rewards"
"""Names in `--accept` all settings of the rewards, and their code."""
ACCEPTED_KEYS = tuple(setting.path for setting in settings() if setting.on_resume == "accepted")
"""Other settings that `--accept KEY` lets a resume change; so may the weight of a reward."""
_UNSET_METRIC = ("eval.metric", None)
"""Key and new value of a metric that is kept."""


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
    """The differences of two resolved configurations that are not allowed on a resume.

    Reward parts are compared by name: `rewards.functions.NAME.weight`.

    A file or folder may be elsewhere, such as in another user's home: hashes of weights, prompts
    and code of rewards are compared. Adapters and code must keep their names.

    `eval.metric` may be unset: a resumed run keeps its metric.

    A decay that ends at `budget.steps` changes with the budget: this is reported as a change of
    `learner.decay_steps`, and setting `learner.decay_steps` to the old budget is not a change.
    """
    before, after = (_with_decay_end(_by_part_name(config)) for config in (old, new))
    return [
        change
        for change in diff_configs(before, after)
        if _on_resume(change[0]) not in {"free", "hardware"}
        and (change[0], change[2]) != _UNSET_METRIC
        and not _is_moved(change)
    ]


def hardware_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The differences of two resolved configurations in devices and sizes."""
    return [change for change in diff_configs(old, new) if _on_resume(change[0]) == "hardware"]


def hardware_id(config: Mapping[str, Any]) -> str:
    """A short hash of the settings of devices and sizes."""
    values = [(key, value) for key, value in _flatten(config) if _on_resume(key) == "hardware"]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_DIGITS]


def code_changes(old_code: Mapping[str, str], new_code: Mapping[str, str]) -> list[Change]:
    """The parts whose code has changed: `rewards.functions.NAME.code`, with short hashes.

    Both map the names of parts to the SHA-256 of their files; parts in both are compared.
    """
    return [
        (f"{_FUNCTIONS}.{name}.code", old_code[name][:_DIGITS], new_code[name][:_DIGITS])
        for name in new_code
        if name in old_code and old_code[name] != new_code[name]
    ]


def is_reward_change(change: Change) -> bool:
    """Whether `--accept rewards` covers the change."""
    return _on_resume(change[0]) == "rewards"


def check_accept(keys: Iterable[str]) -> None:
    """Refuses what `--accept` cannot name.

    Raises:
        ConfigError: with one line for each.
    """
    mistakes = [
        f"command line: --accept {key}: a resume cannot change this; it can change "
        f"{', '.join((REWARDS, *ACCEPTED_KEYS, f'{_FUNCTIONS}.NAME.weight'))}"
        for key in keys
        if key not in {REWARDS, *ACCEPTED_KEYS}
        and not (key.startswith(f"{_FUNCTIONS}.") and key.endswith(".weight"))
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def is_accepted(change: Change, accept: Collection[str]) -> bool:
    """Whether the change is covered by the keys that `--accept` names."""
    return change[0] in accept or (REWARDS in accept and is_reward_change(change))


def refusal(changes: Collection[Change]) -> str:
    """What can be done about changed settings; for each a line, and the flag that accepts it."""
    lines = [f"{change_lines([change])}{_flag(change)}" for change in changes]
    accepting = ", or with the flags below to accept the new ones" * any(map(_flag, changes))
    what = (
        f"resume it with the old values{accepting}, or start another run from its checkpoint with "
        "--run.name and --run.fork:"
    )
    return "\n".join([what, *lines])


def _flag(change: Change) -> str:
    key = REWARDS if is_reward_change(change) else change[0]
    return f" (--accept {key})" if key in {REWARDS, *ACCEPTED_KEYS} else ""


def change_lines(changes: Iterable[Change]) -> str:
    """One line for each change: the key, its old and its new value."""
    return "\n".join(
        f"  {key}: was {show_value(before)}, now {show_value(after)}"
        for key, before, after in changes
    )


def _on_resume(key: str) -> OnResume:
    if key.startswith(f"{_FUNCTIONS}."):
        return "rewards"  # parts are compared by name, which is no key of the schema
    found = find_setting(key.split("."))
    return "alters" if found is None else found.on_resume


def _is_moved(change: Change) -> bool:
    """Whether a path may name the same file or folder in another place."""
    key, *values = change
    paths = [Path(value) for value in values if isinstance(value, str)]
    if len(paths) < 2 or not all(path.is_absolute() for path in paths):
        return False
    found = find_setting(key.split("."))
    is_function = key.startswith(f"{_FUNCTIONS}.") and key.endswith(".function")
    kind = "function" if is_function else found.node.get("input") if found is not None else None
    return kind in {"model", "data"} or (kind is not None and paths[0].name == paths[1].name)


def _by_part_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a table of reward parts in place of their list, by name.

    Settings of a part that may change are left out.
    """
    rewards, left_out = config["rewards"], {"name", *_FREE_PART_KEYS}
    parts = {
        part["name"]: {key: value for key, value in part.items() if key not in left_out}
        for part in rewards["functions"]
    }
    return {**config, "rewards": {**rewards, "functions": parts}}


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
