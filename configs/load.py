"""Loads a TOML file or run folder with command-line overrides, and reports all mistakes at once."""

from __future__ import annotations

import copy
import itertools
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.base import Table, nearest_hint
from configs.conflicts import problems, without
from configs.errors import ABSENT, ConfigError, Mistake, explain_validation, value_at
from configs.errors import Path as KeyPath
from configs.overrides import Override, apply_overrides
from configs.schema import Config
from configs.settings import find_setting
from configs.short_forms import completed, long_form

AS_TRAINED: tuple[Override, ...] = (
    ("plan.rollout_weights", "shared"),
    ("plan.kv_cache", "model"),
)
"""First overrides of commands without training: they sample with the weights that were trained."""
_PRESETS = Path(__file__).parent
_REQUIRED: dict[str, dict[str, Any]] = {
    "run": {"name": "x"},
    "model": {"path": "/"},
    "data": {"train": {}},
    "rewards": {"functions": [{"name": "x", "function": "x:x"}]},
    "rollout": {"max_prompt_tokens": 1, "max_new_tokens": 1},
    "budget": {},
}
"""Placeholders of required settings that have a mistake; nothing reads them."""


@dataclass(frozen=True)
class ReadConfig:
    """A configuration, its mistakes, and what was assumed: one line each.

    Settings with a mistake have no value: reading one of them raises `MissingSetting`.
    """

    config: Config
    mistakes: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def assumes_platform(self) -> bool:
        """Whether the devices are those of this machine."""
        return any(line.startswith("plan.platform") for line in self.assumed)

    @property
    def assumes_gpu(self) -> bool:
        """Whether the kind of GPU alone is that of this machine."""
        return any(line.startswith("plan.gpu") for line in self.assumed)


def load_config(
    path: str | Path,
    overrides: Sequence[Override] = (),
    *,
    say: Callable[[str], object] | None = None,
) -> Config:
    """Reads a configuration as `read_config` and refuses mistakes; `say` receives what is assumed.

    Raises:
        ConfigError: with all mistakes, one line each.
    """
    read = read_config(path, overrides)
    if read.mistakes:
        raise ConfigError(*read.mistakes)
    if say is not None:
        for line in read.assumed:
            say(line)
    return read.config


def read_config(path: str | Path, overrides: Sequence[Override] = ()) -> ReadConfig:
    """Reads the configuration of a TOML file or run folder and applies `overrides`.

    Relative paths become absolute: those of data, models, adapters and reward functions in a TOML
    file relative to its folder, `run.dir` and paths in `overrides` relative to `configs.base.home`.

    Raises:
        ConfigError: if the file cannot be read.
    """
    tree, unknown = apply_overrides(_read(Path(path)), overrides)
    tree, assumed = completed(tree, name=Path(path).stem)
    config, wrong = _validate(tree, unknown)
    given = [tuple(key.split(".")) for key, _ in overrides]
    mistakes = tuple(_lines(wrong, str(path), given))
    if not mistakes:
        config, rounded = config.rounded()
        assumed += rounded
    return ReadConfig(config, mistakes, tuple(assumed))


def validated(tree: Mapping[str, Any]) -> Config:
    """The configuration of these settings, by table: neither file nor machine implies others.

    Raises:
        ConfigError: with all mistakes, one line each; sizes are not rounded, but refused.
    """
    config, wrong = _validate(tree)
    mistakes = [str(one) for one in wrong] or config.rounded()[1]
    if mistakes:
        raise ConfigError(*mistakes)
    return config


def config_to_json(config: Config) -> str:
    """The resolved configuration as JSON: all settings with defaults, in the schema's order.

    Raises:
        MissingSetting: if a setting has a mistake.
    """
    _require_all(config)
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def changed_settings(table: Table, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings below `path` that are not defaults, by key; tables in lists as plain values."""
    for name, field in type(table).model_fields.items():
        value, key = getattr(table, name), f"{path}.{name}".strip(".")
        if value == field.get_default():
            continue
        if isinstance(value, Table):
            yield from changed_settings(value, key)
        elif isinstance(value, tuple):
            yield key, [dict(changed_settings(v)) if isinstance(v, Table) else v for v in value]
        else:
            yield key, value


def _require_all(table: Table) -> None:
    for name in type(table).model_fields:
        value = getattr(table, name)
        if isinstance(value, Table):
            _require_all(value)


def read_saved_config(path: Path) -> dict[str, Any]:
    """Reads the settings in a run's `config.json`, which `config_to_json` wrote.

    Raises:
        FileNotFoundError: if there is no file.
        ConfigError: if it is damaged.
    """
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
    return f"presets in {_PRESETS}: {', '.join(Path(name).name for name in presets())}"


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return _read_run(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        return dict(long_form(tomllib.loads(text), path.absolute().parent))
    except FileNotFoundError:
        what = f"{path}: no such file{nearest_hint(path)}; {presets_hint()}"
    except OSError as error:
        what = f"{path}: cannot be read: {error.strerror}; {presets_hint()}"
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        what = f"{path}: {error}"
    raise ConfigError(what)


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        return read_saved_config(folder / "config.json")
    except FileNotFoundError:
        raise ConfigError(f"{folder}: not a run folder: it has no config.json") from None


def _validate(
    tree: Mapping[str, Any], known: Iterable[Mistake] = ()
) -> tuple[Config, list[Mistake]]:
    """Validates the settings one by one, and then whether they suit each other.

    Returns the configuration without the settings that have a mistake, and all mistakes, those
    `known` included.
    """
    found = list(known)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        wrong = list(explain_validation(error))
        config = Config.model_validate(_valid_part(tree, [one.path for one in wrong]))
        found += wrong
    known_keys = (one.path for one in found if find_setting(one.path) is not None)
    config = without(config, *(".".join(map(str, path)) for path in known_keys))
    for key, what in list(problems(config)):
        path = tuple(key.split("."))
        value = value_at(tree, path)
        # Tables are too long to be shown.
        found.append(Mistake(path, what, ABSENT if isinstance(value, Mapping) else value))
        config = without(config, key)
    return config, found


def _valid_part(tree: Mapping[str, Any], wrong: Sequence[KeyPath]) -> dict[str, Any]:
    """The settings without those that are wrong, and with some value for required ones."""
    rest = copy.deepcopy(dict(tree))
    for path in wrong:
        # An unknown key is taken out of its element of a list, another one with the whole list.
        at = path
        if find_setting(path) is not None:
            at = tuple(itertools.takewhile(lambda part: not isinstance(part, int), path))
        holder: Any = value_at(rest, at[:-1])
        if holder is not ABSENT:
            holder.pop(at[-1], None)
    for table, values in _REQUIRED.items():
        rest[table] = {**values, **rest.get(table, {})}
    return rest


def _lines(
    mistakes: Iterable[Mistake], where: str, given: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    for mistake in mistakes:
        path = tuple(map(str, mistake.path))
        overridden = any(path[: len(key)] == key for key in given)
        yield f"command line: --{mistake}" if overridden else f"{where}: {mistake}"
