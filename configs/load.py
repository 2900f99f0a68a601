"""From a TOML file and command-line overrides to a valid `Config`, or to all of its mistakes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.base import Table
from configs.errors import ConfigError, Mistake, explain_problems, explain_validation
from configs.overrides import Override, apply_overrides
from configs.paths import with_absolute_paths
from configs.schema import Config, cross_problems

AS_LEARNED: tuple[Override, ...] = (
    ("plan.rollout_weights", "shared"),
    ("plan.kv_cache", "model"),
)
"""What is said first where nothing is learned: the policy is looked at as it was learned."""
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def load_config(path: str | Path, overrides: Sequence[Override] = ()) -> Config:
    """The configuration in a TOML file or of a run folder, with `overrides` laid over it.

    Relative paths in it are made absolute against $GEMMA_GRPO_HOME, else the current directory.

    Args:
        path: the file, or the folder of a run, which has a `config.json`.
        overrides: dotted keys and the text given for each, as `configs.cli.parse` returns them.

    Raises:
        ConfigError: with every mistake at once, one line each; only a file that cannot be read ends
            the search early.
    """
    tree, mistakes = apply_overrides(_read(Path(path)), overrides)
    given = [tuple(key.split(".")) for key, _ in overrides]
    config, found = _validate(tree)
    if config is None or mistakes:
        raise ConfigError(*_lines((*mistakes, *found), str(path), given))
    return with_absolute_paths(config)


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
    # Pydantic compares tables only when all are valid; the valid ones can be compared already.
    between = [] if whole else cross_problems(dict(_valid_tables(tree)))
    return None, [*mistakes, *explain_problems(between, tree)]


def _valid_tables(tree: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    for name, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Table)
        try:
            yield name, kind.model_validate(tree[name] if name in tree else field.get_default())
        except ValidationError:
            continue


def _lines(
    mistakes: Iterable[Mistake], where: str, given: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    for mistake in mistakes:
        path = tuple(map(str, mistake.path))
        typed = any(path[: len(key)] == key for key in given)
        yield f"command line: --{mistake}" if typed else f"{where}: {mistake}"
