"""From a TOML file and command-line overrides to a valid `Config`, or to all of its mistakes."""

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
from configs.schema import Config, cross_problems
from configs.settings import find_setting

AS_LEARNED: tuple[Override, ...] = (
    ("plan.rollout_weights", "shared"),
    ("plan.kv_cache", "model"),
)
"""What is said first where nothing is learned: the policy is looked at as it was learned."""
_DEMO = Path(__file__).with_name("demo.toml")
_ROUNDS = 8
"""How often mistaken values are replaced: one value may need another one replaced."""


class _Uncrossed(Config):
    """A configuration whose tables need not fit together."""

    @model_validator(mode="after")
    def _cross(self) -> _Uncrossed:
        return self


_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True)
class Read:
    """A configuration and what is wrong with it.

    Attributes:
        config: the configuration, with other values where there are mistakes; None if nothing can
            stand in for them.
        mistakes: a line each.
        broken: dotted keys whose values are not the user's.
    """

    config: Config | None
    mistakes: tuple[str, ...]
    broken: frozenset[str]


def load_config(path: str | Path, overrides: Sequence[Override] = ()) -> Config:
    """As `read_config`, where mistakes are refused.

    Raises:
        ConfigError: with every mistake at once, one line each.
    """
    read = read_config(path, overrides)
    if read.config is None or read.mistakes:
        raise ConfigError(*read.mistakes)
    return read.config


def read_config(path: str | Path, overrides: Sequence[Override] = ()) -> Read:
    """The configuration in a TOML file or of a run folder, with `overrides` laid over it.

    Relative paths in it are made absolute against $GEMMA_GRPO_HOME, else the current directory.

    Args:
        path: the file, or the folder of a run, which has a `config.json`.
        overrides: dotted keys and the text given for each, as `configs.cli.parse` returns them.

    Raises:
        ConfigError: if the file cannot be read.
    """
    tree, mistakes = apply_overrides(_read(Path(path)), overrides)
    given = [tuple(key.split(".")) for key, _ in overrides]
    config, found = _validate(tree)
    unknown = [
        mistake.path for mistake in (*mistakes, *found) if find_setting(mistake.path) is None
    ]
    meant = {key for path in unknown for key in nearest_keys(path)}
    broken = {key for key in meant if value_at(tree, tuple(key.split("."))) is ABSENT}
    known = _without(tree, unknown)
    if known != tree:
        # Keys that do not exist hide what is wrong with their tables as a whole.
        found += [
            mistake
            for mistake in _validate(known)[1]
            if mistake not in found and not any(overlap(_key(mistake.path), key) for key in broken)
        ]
    if config is None:
        config, replaced = _with_stand_ins(known, [m.path for m in found if m.path not in unknown])
        broken |= replaced
    return Read(
        None if config is None else with_absolute_paths(config),
        tuple(_lines((*mistakes, *found), str(path), given)),
        frozenset(broken),
    )


def config_to_json(config: Config) -> str:
    """The resolved configuration: every setting, defaults included, in the schema's order."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def presets() -> list[str]:
    """The configurations that come with the project, as paths from its top folder."""
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
        what = f"{path}: is not UTF-8 text (byte {error.start})"
    except tomllib.TOMLDecodeError as error:
        what = f"{path}:{_describe(error, text)}"
    raise ConfigError(what)


def _read_run(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = f"{folder}: has no config.json; it is not a run folder"
    except ValueError as error:
        what = f"{path}: is not JSON: {error}"
    else:
        if isinstance(found, dict):
            return found
        what = f"{path}: is not a JSON object"
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
    # Pydantic compares tables only when all are valid; what is valid can be compared already.
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
    """A table without the settings that are wrong; whoever reads one gets an AttributeError."""
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


def _with_stand_ins(
    tree: Mapping[str, Any], paths: Sequence[KeyPath]
) -> tuple[Config | None, set[str]]:
    """The configuration with defaults for what is mistaken, or with the demo's values.

    Returns:
        The configuration, None if no such values are found; and the keys that got other values.
    """
    rest, broken = copy.deepcopy(dict(tree)), {_key(path) for path in paths}
    demo, replaced = _read(_DEMO), set[KeyPath]()
    for _ in range(_ROUNDS):
        try:
            return _Uncrossed.model_validate(rest), broken
        except ValidationError as error:
            wrong = [mistake.path for mistake in explain_validation(error, rest)]
        for path in wrong:
            # Lists are replaced as a whole.
            place = tuple(itertools.takewhile(lambda part: not isinstance(part, int), path))
            broken.add(_key(_replace(rest, place, demo, replaced)))
    return None, broken


def _replace(
    tree: dict[str, Any], path: KeyPath, demo: Mapping[str, Any], replaced: set[KeyPath]
) -> KeyPath:
    """Removes what is at `path`; if nothing is, the demo's value is put there.

    Where the demo has none, or its value was `replaced` already, the same is done with the table.

    Returns:
        The path of what was changed.
    """
    while path:
        holder, stand_in = value_at(tree, path[:-1]), value_at(demo, path)
        if isinstance(holder, dict) and path not in replaced:
            if path[-1] in holder:
                del holder[path[-1]]
                return path
            if stand_in is not ABSENT:
                holder[path[-1]] = copy.deepcopy(stand_in)
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
        typed = any(path[: len(key)] == key for key in given)
        yield f"command line: --{mistake}" if typed else f"{where}: {mistake}"
