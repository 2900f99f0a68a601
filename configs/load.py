"""Loads a TOML file or run folder with command-line overrides, and reports all mistakes at once."""

from __future__ import annotations

import copy
import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from configs.base import Table
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
from configs.paths import with_absolute_paths
from configs.resume import refuse_unknown_keys
from configs.schema import Config, cross_problems
from configs.settings import find_setting

AS_TRAINED: tuple[Override, ...] = (
    ("plan.rollout_weights", "shared"),
    ("plan.kv_cache", "model"),
)
"""First overrides of commands without training: they sample with the weights that were trained."""
_DEMO = Path(__file__).with_name("demo.toml")
_ROUNDS = 8
"""Maximum rounds of replacing invalid values: one replacement may require another one."""


class _ConfigWithoutCrossChecks(Config):
    """A configuration without checks between tables."""

    @model_validator(mode="after")
    def _cross(self) -> _ConfigWithoutCrossChecks:
        return self


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

    Relative paths in it become absolute, relative to $GEMMA_GRPO_HOME or the current directory.

    Args:
        path: the TOML file, or the run folder, which contains `config.json`.
        overrides: dotted keys and their texts, as `configs.cli.parse` returns them.

    Raises:
        ConfigError: if the file cannot be read, or an earlier version wrote the run folder.
    """
    tree, mistakes = apply_overrides(_read(Path(path)), overrides)
    given = [tuple(key.split(".")) for key, _ in overrides]
    config, found = _validate(tree)
    unknown = [
        mistake.path for mistake in (*mistakes, *found) if find_setting(mistake.path) is None
    ]
    meant = {key for path in unknown for key in nearest_keys(path)}
    invalid = {key for key in meant if value_at(tree, tuple(key.split("."))) is ABSENT}
    known = _without(tree, unknown)
    if known != tree:
        # Pydantic skips the validators of a table that has unknown keys.
        found += [
            mistake
            for mistake in _validate(known)[1]
            if mistake not in found and not any(overlap(_key(mistake.path), key) for key in invalid)
        ]
    if config is None:
        config, replaced = _with_substitutes(
            known, [mistake.path for mistake in found if mistake.path not in unknown]
        )
        invalid |= replaced
    return ReadConfig(
        None if config is None else with_absolute_paths(config),
        tuple(_lines((*mistakes, *found), str(path), given)),
        frozenset(invalid),
    )


def config_to_json(config: Config) -> str:
    """The resolved configuration as JSON: all settings with defaults, in the schema's order."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def presets() -> list[str]:
    """The presets of the project, as paths relative to its root."""
    folder = Path(__file__).parent
    return sorted(f"{folder.name}/{path.name}" for path in folder.glob("*.toml"))


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return _read_run(path)
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except FileNotFoundError:
        what = f"{path}: no such file; presets: {', '.join(presets())}"
    except OSError as error:
        what = f"{path}: cannot be read: {error.strerror}; presets: {', '.join(presets())}"
    except UnicodeDecodeError as error:
        what = f"{path}: not UTF-8 text (byte {error.start})"
    except tomllib.TOMLDecodeError as error:
        what = f"{path}:{_describe(error, text)}"
    raise ConfigError(what)


def _read_run(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = f"{folder}: not a run folder: it has no config.json"
    except ValueError as error:
        what = f"{path}: not JSON: {error}"
    else:
        if isinstance(found, dict):
            refuse_unknown_keys(found, folder)
            return found
        what = f"{path}: not a JSON object"
    raise ConfigError(what)


def _describe(error: tomllib.TOMLDecodeError, text: str) -> str:
    message = str(error)
    place = _TOML_PLACE.search(message)
    if place is None:
        return f" {message}"
    lines = text.split("\n")
    line, column = place.groups(default="")
    where = f"{line}:{column}" if line else f"{len(lines)}:{len(lines[-1]) + 1}"
    return f"{where}: {message[: place.start()]}"


def _validate(tree: Mapping[str, Any]) -> tuple[Config | None, list[Mistake]]:
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        mistakes = list(explain_validation(error, tree))
        whole = any(detail["loc"] == () for detail in error.errors())
    # Pydantic runs checks between tables only if all are valid; run those of the valid ones here.
    between = [] if whole else cross_problems(dict(_valid_tables(tree)))
    return None, [*mistakes, *explain_problems(between, tree)]


def _valid_tables(tree: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    for name, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Table)
        given = tree[name] if name in tree else field.get_default()
        try:
            yield name, kind.model_validate(given)
        except ValidationError as error:
            part = _part(kind, given, error)
            if part is not None:
                yield name, part


def _part(kind: type[Table], given: object, error: ValidationError) -> Table | None:
    """A table without its invalid settings; reading one of them raises AttributeError."""
    wrong = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
    if not (wrong and isinstance(given, Mapping)):
        return None
    try:
        part = kind.model_validate({key: given[key] for key in given if key not in wrong})
    except ValidationError:
        return None
    for key in wrong:
        vars(part).pop(key, None)
    return part


def _without(tree: Mapping[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
    rest = copy.deepcopy(dict(tree))
    for path in paths:
        holder = value_at(rest, path[:-1])
        if isinstance(holder, dict):
            holder.pop(path[-1], None)
    return rest


def _with_substitutes(
    tree: Mapping[str, Any], paths: Sequence[KeyPath]
) -> tuple[Config | None, set[str]]:
    """The configuration with defaults, or the demo's values, in place of invalid values.

    Returns:
        The configuration, None if no substitutes are valid; and the keys that have substitutes.
    """
    rest, invalid = copy.deepcopy(dict(tree)), {_key(path) for path in paths}
    demo, replaced = _read(_DEMO), set[KeyPath]()
    for _ in range(_ROUNDS):
        try:
            return _ConfigWithoutCrossChecks.model_validate(rest), invalid
        except ValidationError as error:
            wrong = [mistake.path for mistake in explain_validation(error, rest)]
        for path in wrong:
            # Lists are replaced as a whole.
            place = tuple(itertools.takewhile(lambda part: not isinstance(part, int), path))
            invalid.add(_key(_replace(rest, place, demo, replaced)))
    return None, invalid


def _replace(
    tree: dict[str, Any], path: KeyPath, demo: Mapping[str, Any], replaced: set[KeyPath]
) -> KeyPath:
    """Removes the value at `path`, or sets the demo's value if `path` has none.

    If the demo has no value, or its value is in `replaced`, the parent table is replaced instead.

    Returns:
        The changed path.
    """
    while path:
        holder, substitute = value_at(tree, path[:-1]), value_at(demo, path)
        if isinstance(holder, dict) and path not in replaced:
            if path[-1] in holder:
                del holder[path[-1]]
                return path
            if substitute is not ABSENT:
                holder[path[-1]] = copy.deepcopy(substitute)
                replaced.add(path)
                return path
        path = path[:-1]
    return path


def _key(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _lines(
    mistakes: Iterable[Mistake], where: str, given: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    for mistake in mistakes:
        path = tuple(map(str, mistake.path))
        overridden = any(path[: len(key)] == key for key in given)
        yield f"command line: --{mistake}" if overridden else f"{where}: {mistake}"
