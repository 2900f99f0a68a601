"""Messages for the mistakes in a configuration, with the nearest valid key or value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

from configs.base import MissingSetting
from configs.nearest import nearest_keys, nearest_value
from configs.settings import Setting, find_setting
from configs.toml_text import show_value

_LONGEST_VALUE = 60
ABSENT = object()
"""The value of a missing key."""

Path = tuple[str | int, ...]
P = ParamSpec("P")
T = TypeVar("T")


class ConfigError(ValueError):
    """All mistakes of the user, one line each: the place, the given value and a valid one."""

    def __init__(self, *mistakes: str) -> None:
        """Stores one line for each mistake."""
        super().__init__(*mistakes)
        self.mistakes = mistakes

    def __str__(self) -> str:
        """One line for each mistake."""
        return "\n".join(self.mistakes)


class MistakeCollector:
    """Collects mistakes of independent checks, beside those found before, to tell all at once."""

    def __init__(self, mistakes: Iterable[str] = ()) -> None:
        self._errors: list[Exception] = [ConfigError(line) for line in mistakes]
        self._skipped: MissingSetting | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no mistake was found."""
        return not self._errors

    def add(self, mistake: Exception) -> None:
        """Collects a mistake."""
        self._errors.append(mistake)

    def attempt(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Returns the result of a check; None if it raises a mistake, which is collected.

        A check that reads a setting with a known mistake ends there, with None.
        """
        try:
            return check(*args, **kwargs)
        except (ValueError, FileNotFoundError) as mistake:
            self.add(mistake)
        except MissingSetting as skipped:
            self._skipped = skipped
        return None

    def raise_if_any(self) -> None:
        """Raises the collected mistakes, if any.

        Raises:
            ConfigError: with the lines of several mistakes, each once.
            ValueError: a single mistake unchanged.
            FileNotFoundError: a single mistake unchanged.
            MissingSetting: if there is none, but a check was not finished.
        """
        lines = dict.fromkeys(map(str, self._errors))
        if len(lines) == 1:
            raise self._errors[0]
        if lines:
            raise ConfigError(*lines)
        if self._skipped is not None:
            raise self._skipped


@dataclass(frozen=True)
class Mistake:
    """A mistake in one key; `value` is ABSENT if none was given or it is not shown."""

    path: Path
    what: str
    value: object = ABSENT

    def __str__(self) -> str:
        """`path = value: what`."""
        given = "" if self.value is ABSENT else f" = {_short(self.value)}"
        return f"{'.'.join(map(str, self.path))}{given}: {self.what}"


def unknown_key(path: Path, prefix: str = "") -> Mistake:
    """The mistake of setting the unknown key `path`; `prefix` precedes suggested keys."""
    meant = [prefix + key for key in nearest_keys(path)]
    if meant:
        return Mistake(path, f"unknown; did you mean {' or '.join(meant)}?")
    return Mistake(path, "unknown; docs/from_trl.md has our names for those of TRL, verl, OpenRLHF")


def explain_validation(error: ValidationError) -> Iterator[Mistake]:
    """All mistakes that pydantic found in single settings, in the order of the schema."""
    for detail in error.errors(include_url=False):
        path, kind, value = detail["loc"], detail["type"], detail["input"]
        if kind == "too_short" and value:
            # Pydantic counts only valid elements; the invalid ones have their own messages.
            continue
        if kind == "extra_forbidden":
            yield unknown_key(path)
            continue
        setting = find_setting(path)
        assert setting is not None, f"pydantic reports a key that its schema lacks: {path}"
        if kind == "missing":
            yield Mistake(path, _missing(setting))
        elif kind == "value_error":
            yield Mistake(path, str(detail["ctx"]["error"]), value)
        else:
            yield Mistake(path, _invalid(setting, value), value)


def _missing(setting: Setting) -> str:
    if setting.type == "object":
        children = list(setting.children())
        needed = [child.path for child in children if child.required]
        if needed:
            return f"missing; this table needs {', '.join(needed)}"
        return f"missing; this table has {', '.join(child.path for child in children)}"
    return f"missing; must be {setting.allowed} ({setting.description})"


def _invalid(setting: Setting, value: object) -> str:
    allowed = setting.allowed
    if isinstance(value, float) and not math.isfinite(value):
        allowed = allowed.replace("a number", "a finite number")
    nearest = nearest_value(setting, value)
    if nearest is not None:
        return f"must be {allowed}; nearest valid: {nearest}"
    if setting.default is not None and setting.type != "object":
        return f"must be {allowed}; default: {show_value(setting.default)}"
    return f"must be {allowed}"


def value_at(tree: Mapping[str, Any], path: Path) -> object:
    """The value at `path`; ABSENT if there is none."""
    value: Any = tree
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and str(part).isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return ABSENT
    return value


def _short(value: object) -> str:
    text = show_value(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
