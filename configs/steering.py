"""Which settings `launch.control RUN_DIR set KEY VALUE` may change while a run runs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from configs.errors import ConfigError, Mistake, Path, explain_validation, unknown_key
from configs.load import config_to_json
from configs.overrides import UNSET
from configs.schema import Config
from configs.settings import find_setting
from configs.toml_text import read_value

_NAME, _IN = "NAME", " " * 6
_INTERVALS = ("eval.every_steps", "eval.every_minutes")
_WEIGHTS, _WEIGHT = "rewards.functions.", ".weight"
STEERABLE = (
    "learner.lr",
    "learner.kl_coef",
    f"{_WEIGHTS}{_NAME}{_WEIGHT}",
    *_INTERVALS,
)
"""The keys; NAME is the name of a reward part. What is compiled and sampled depends on none."""


def steerable_lines() -> Iterator[str]:
    """Each key, and below it its meaning and the allowed values."""
    for key in STEERABLE:
        setting = find_setting(key.replace(_NAME, "0").split("."))
        assert setting is not None
        meaning = f"{setting.description}; {setting.allowed}"
        yield from (
            f"  {key}",
            *textwrap.wrap(meaning, 92, initial_indent=_IN, subsequent_indent=_IN),
        )


def is_weight(key: str) -> bool:
    """Whether the key is the weight of a reward part."""
    return key.startswith(_WEIGHTS) and key.endswith(_WEIGHT)


def parse_value(text: str) -> object:
    """The value that a user writes: TOML, or `none`."""
    return None if text == UNSET else read_value(text)


def steered(config: Config, key: str, value: object) -> Config:
    """The configuration with another value of a steerable key.

    Args:
        config: of the run, as it is now.
        key: one of `STEERABLE`, with the name of a reward part in place of NAME.
        value: as TOML has it.

    Raises:
        ConfigError: if the key may not change, or the value is invalid or without effect.
    """
    path = _path(config, key)
    if key in _INTERVALS and not value_of(config.model_dump(), key):
        other = next(one for one in _INTERVALS if one != key)
        kept = f"is not the interval of this run, whose kind cannot change; set {other}"
        what = kept if config.eval.validates else "the run has no validation split"
        raise ConfigError(f"{key}: {what}")
    if key in _INTERVALS and (value is None or (key == _INTERVALS[0] and value == 0)):
        what = "a running run cannot stop validating; choose a longer interval"
        raise ConfigError(str(Mistake(path, what, value)))
    changed = with_values(config, {key: value})
    coef = changed.learner.kl_coef
    if (coef > 0) != (config.learner.kl_coef > 0):
        has = "has no KL term" if coef else "has a KL term"
        nearest = "0" if coef else "just above 0"
        what = f"the run {has}, which is compiled at its start; nearest valid: {nearest}"
        raise ConfigError(str(Mistake(path, what, coef)))
    if is_weight(key) and config.rollout.ahead != "off":
        what = "may not change with rollout.ahead, where rollouts are scored a step ahead"
        raise ConfigError(f"{key}: {what}")
    return changed


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The configuration with other values of steerable keys.

    Raises:
        ConfigError: with all mistakes, if it is invalid.
    """
    tree = json.loads(config_to_json(config))
    for key, value in values.items():
        set_value(tree, key, value)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        mistakes = explain_validation(error, tree)
        named = (replace(one, path=_named(config, one.path)) for one in mistakes)
        raise ConfigError(*map(str, named)) from None


def value_of(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a steerable key in a resolved configuration.

    Raises:
        KeyError: if there is no such reward part.
    """
    table, leaf = _table(tree, key)
    return table.get(leaf)


def set_value(tree: Mapping[str, Any], key: str, value: object) -> None:
    """Sets a steerable key in a resolved configuration.

    Raises:
        KeyError: if there is no such reward part.
    """
    table, leaf = _table(tree, key)
    table[leaf] = value


def _table(tree: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    if is_weight(key):
        for part in tree["rewards"]["functions"]:
            if part["name"] == key.removeprefix(_WEIGHTS).removesuffix(_WEIGHT):
                return part, "weight"
        raise KeyError(key)
    name, _, leaf = key.partition(".")
    return tree[name], leaf


def _path(config: Config, key: str) -> Path:
    """The key as a path.

    Raises:
        ConfigError: if it is unknown or may not change.
    """
    if is_weight(key):
        names = [part.name for part in config.rewards.functions]
        name = key.removeprefix(_WEIGHTS).removesuffix(_WEIGHT)
        if name not in names:
            (nearest,) = get_close_matches(name, names, n=1, cutoff=0.0)
            what = f"no reward part has this name; nearest: {_WEIGHTS}{nearest}{_WEIGHT}"
            raise ConfigError(f"{key}: {what}")
    elif key not in STEERABLE:
        if find_setting(key.split(".")) is None:
            near = get_close_matches(key, STEERABLE, n=1)
            known = unknown_key(tuple(key.split("."))).what
            what = f"unknown; did you mean {near[0]}?" if near else known
        else:
            what = f"may not change while a run runs; these may: {', '.join(STEERABLE)}"
        raise ConfigError(f"{key}: {what}")
    return tuple(key.split("."))


def _named(config: Config, path: Path) -> Path:
    """The path with the name of a reward part in place of its index."""
    if path[:2] != ("rewards", "functions") or len(path) <= 2:
        return path
    index = path[2]
    assert isinstance(index, int)
    return (*path[:2], config.rewards.functions[index].name, *path[3:])
