"""Loads a TOML file or run folder with command-line overrides, and reports all mistakes at once."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.base import Problem, Table, TableError, absolute_input, nearest_hint
from configs.errors import (
    ABSENT,
    ConfigError,
    Mistake,
    explain_problems,
    explain_validation,
    overlap,
    value_at,
)
from configs.errors import Path as KeyPath
from configs.nearest import nearest_keys
from configs.overrides import Override, apply_overrides
from configs.resume import refuse_unknown_keys
from configs.schema import Config, cross_problems
from configs.settings import find_setting

AS_TRAINED: tuple[Override, ...] = (
    ("plan.rollout_weights", "shared"),
    ("plan.kv_cache", "model"),
)
"""First overrides of commands without training: they sample with the weights that were trained."""
_PRESETS = Path(__file__).parent
_DEMO = _PRESETS / "demo.toml"
_ROUNDS = 8
"""Maximum rounds of replacing invalid values: one replacement may require another one."""


class _Tables(Config):
    """A configuration without the checks between tables."""

    def conflicts(self) -> Iterator[Problem]:
        yield from ()


_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True)
class ReadConfig:
    """A configuration and its mistakes.

    Attributes:
        config: the configuration, with substitutes for invalid values; None if there is no valid
            substitute.
        mistakes: one line each.
        invalid: dotted keys whose values are substitutes.
    """

    config: Config | None
    mistakes: tuple[str, ...]
    invalid: frozenset[str]


def load_config(path: str | Path, overrides: Sequence[Override] = ()) -> Config:
    """Reads a configuration as `read_config` and refuses mistakes.

    Raises:
        ConfigError: with all mistakes, one line each.
    """
    read = read_config(path, overrides)
    if read.config is None or read.mistakes:
        raise ConfigError(*read.mistakes)
    return read.config


def read_config(path: str | Path, overrides: Sequence[Override] = ()) -> ReadConfig:
    """Reads the configuration of a TOML file or run folder and applies `overrides`.

    Relative paths become absolute: those of data, models, adapters and reward functions in a TOML
    file relative to its folder, `run.dir` and paths in `overrides` relative to `configs.base.home`.

    Args:
        path: the TOML file, or the run folder, which contains `config.json`.
        overrides: dotted keys and their texts, as `configs.cli.parse` returns them.

    Raises:
        ConfigError: if the file cannot be read, or an earlier version wrote the run folder.
    """
    tree, unknown = apply_overrides(_read(Path(path)), overrides)
    if huge := next(_huge_integers(tree), None):
        raise ConfigError(f"{path}: {huge}: an integer of more than 64 bits")
    meant = {key for mistake in unknown for key in _meant_keys(mistake.path, tree)}
    config, found, invalid = _validate(tree, meant)
    given = [tuple(key.split(".")) for key, _ in overrides]
    lines = tuple(_lines((*unknown, *found), str(path), given))
    return ReadConfig(config, lines, frozenset(invalid))


def config_to_json(config: Config) -> str:
    """The resolved configuration as JSON: all settings with defaults, in the schema's order."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def read_saved_config(path: Path) -> dict[str, Any]:
    """Reads the settings in a run's `config.json`, which `config_to_json` wrote.

    Raises:
        FileNotFoundError: if there is no file.
        ConfigError: if it is damaged.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is damaged: not a file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged: not a JSON object")
    return found


def presets() -> list[str]:
    """The presets of the project, as paths relative to its root."""
    return sorted(f"{_PRESETS.name}/{path.name}" for path in _PRESETS.glob("*.toml"))


def presets_hint() -> str:
    """Where the presets are and their names, for the end of a message."""
    names = presets()
    if Path.cwd() == _PRESETS.parent:
        return f"presets: {', '.join(names)}"
    return f"presets in {_PRESETS}: {', '.join(Path(name).name for name in names)}"


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return _read_run(path)
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise ConfigError(f"{path}: not a file; {presets_hint()}")
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _with_absolute_inputs(tomllib.loads(text), path.absolute().parent)
    except FileNotFoundError:
        what = f"{path}: no such file{nearest_hint(path)}; {presets_hint()}"
    except OSError as error:
        what = f"{path}: cannot be read: {error.strerror}; {presets_hint()}"
    except UnicodeDecodeError as error:
        what = f"{path}: not UTF-8 text (byte {error.start})"
    except tomllib.TOMLDecodeError as error:
        what = f"{path}:{_describe(error, text)}"
    except RecursionError:
        what = f"{path}: nested too deeply"
    raise ConfigError(what)


def _huge_integers(value: object, key: str = "") -> Iterator[str]:
    """Keys with an integer that TOML does not allow."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _huge_integers(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _huge_integers(item, key)
    elif isinstance(value, int) and value.bit_length() > 63:
        yield key


def _with_absolute_inputs(value: Any, folder: Path, path: KeyPath = ()) -> Any:
    """The settings at `path` with the paths of what a run reads relative to `folder`."""
    if isinstance(value, dict):
        return {k: _with_absolute_inputs(item, folder, (*path, k)) for k, item in value.items()}
    if isinstance(value, list):
        return [_with_absolute_inputs(v, folder, (*path, n)) for n, v in enumerate(value)]
    setting = find_setting(path) if isinstance(value, str) else None
    if setting is None or "input" not in setting.node:
        return value
    try:
        return absolute_input(value, setting.node["input"], folder)
    except TableError:
        return value  # the validation reports it


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        found = read_saved_config(folder / "config.json")
    except FileNotFoundError:
        raise ConfigError(f"{folder}: not a run folder: it has no config.json") from None
    refuse_unknown_keys(found, folder)
    return found


def _describe(error: tomllib.TOMLDecodeError, text: str) -> str:
    message = str(error)
    place = _TOML_PLACE.search(message)
    if place is None:
        return f" {message}"
    lines = text.split("\n")
    line, column = place.groups(default="")
    where = f"{line}:{column}" if line else f"{len(lines)}:{len(lines[-1]) + 1}"
    return f"{where}: {message[: place.start()]}"


def _validate(
    tree: dict[str, Any], meant: set[str]
) -> tuple[Config | None, list[Mistake], set[str]]:
    """Validates `tree` in rounds, each without the mistakes of those before.

    Pydantic skips the checks of a table that has a mistake. So unknown keys are removed from the
    tree, and invalid values are replaced by the demo's. Checks that read a substitute do not count.

    Args:
        tree: the settings, which are changed.
        meant: missing keys that the user may have meant by unknown keys.

    Returns:
        The configuration, None if the substitutes are not valid; all mistakes; and the keys with
        substitutes, missing by mistake, or refused.
    """
    found: list[Mistake] = []
    replaced: set[str] = set()
    for number in range(_ROUNDS):
        try:
            tables = dict(_Tables.model_validate(tree))
        except ValidationError as error:
            mistakes = list(explain_validation(error, tree))
        else:
            between = cross_problems(_without(tables, meant | replaced))
            mistakes = list(explain_problems(tuple(between), tree))
            refused = {_key(mistake.path) for mistake in mistakes}
            return Config.model_construct(**tables), found + mistakes, meant | replaced | refused
        found += (
            mistake
            for mistake in mistakes
            if number == 0 or not _follows(mistake, meant=meant, replaced=replaced)
        )
        unknown = [mistake.path for mistake in mistakes if find_setting(mistake.path) is None]
        for path in unknown:
            meant |= _meant_keys(path, tree)
            del _holder(tree, path)[path[-1]]
        for path in (mistake.path for mistake in mistakes if mistake.path not in unknown):
            replaced.add(_substitute(tree, path, replaced))
    return None, found, meant | replaced


def _follows(mistake: Mistake, *, meant: set[str], replaced: set[str]) -> bool:
    """Whether a mistake may result from a missing key, or from a substitute in its table."""
    key, table = _key(mistake.path), _key(mistake.path[:-1])
    return any(overlap(key, other) for other in meant) or any(
        overlap(table or key, other) for other in replaced
    )


def _without(tables: Mapping[str, Table], keys: Iterable[str]) -> dict[str, Table]:
    """The tables without these settings; reading one of them raises AttributeError."""
    rest = {name: table.model_copy() for name, table in tables.items()}
    for key in keys:
        name, _, inner = key.partition(".")
        if inner and name in rest:
            vars(rest[name]).pop(inner.partition(".")[0], None)
        else:
            rest.pop(name, None)
    return rest


def _meant_keys(path: KeyPath, tree: Mapping[str, Any]) -> set[str]:
    """The missing keys that the user may have meant by the unknown key `path`."""
    nearest = nearest_keys(path)
    return {key for key in nearest if value_at(tree, tuple(key.split("."))) is ABSENT}


def _substitute(tree: Mapping[str, Any], path: KeyPath, replaced: Container[str]) -> str:
    """Sets the demo's value in place of an invalid one.

    Lists are replaced as a whole; tables, if the demo lacks the value or it did not help before.

    Returns:
        The key whose value was replaced.
    """
    demo = Config.model_validate(_read(_DEMO)).model_dump(mode="json")
    place = tuple(itertools.takewhile(lambda part: not isinstance(part, int), path))
    while place and (_key(place) in replaced or value_at(demo, place) is ABSENT):
        place = place[:-1]
    if place:
        _holder(tree, place)[place[-1]] = value_at(demo, place)
    return _key(place or path)


def _holder(tree: Mapping[str, Any], path: KeyPath) -> dict[str | int, Any]:
    """The table of the key `path`."""
    holder = value_at(tree, path[:-1])
    assert isinstance(holder, dict)
    return holder


def _key(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _lines(
    mistakes: Iterable[Mistake], where: str, given: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    for mistake in mistakes:
        path = tuple(map(str, mistake.path))
        overridden = any(path[: len(key)] == key for key in given)
        yield f"command line: --{mistake}" if overridden else f"{where}: {mistake}"
