"""Mistakes in a configuration: found by pydantic, told in words that say what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

from configs.base import Problem, TableError
from configs.nearest import nearest_keys, nearest_value, sibling_names
from configs.settings import Setting, find_setting
from configs.toml_text import show_value

_LONGEST_VALUE = 60
ABSENT = object()
"""The value of a key that is not there."""

Path = tuple[str | int, ...]
P = ParamSpec("P")
T = TypeVar("T")


class ConfigError(ValueError):
    """The user's mistakes, all of them.

    Attributes:
        mistakes: a line each: where, what was given, what would be right. `str` joins the lines.
    """

    def __init__(self, *mistakes: str) -> None:
        """Takes one line for each mistake."""
        super().__init__(*mistakes)
        self.mistakes = mistakes

    def __str__(self) -> str:
        """One line for each mistake."""
        return "\n".join(self.mistakes)


class Refusals:
    """Mistakes that independent checks find, gathered until all checks are done.

    Args:
        mistakes: lines on what was found before.
        broken: dotted keys whose values are not the user's, because of these mistakes.
    """

    def __init__(self, mistakes: Iterable[str] = (), broken: Iterable[str] = ()) -> None:
        self._errors: list[Exception] = [ConfigError(line) for line in mistakes]
        self._broken = tuple(broken)

    def intact(self, *keys: str) -> bool:
        """Whether the values of these settings and tables are the user's."""
        return not any(overlap(key, broken) for key in keys for broken in self._broken)

    @property
    def is_empty(self) -> bool:
        """Whether no mistake was found."""
        return not self._errors

    def attempt(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What a check returns; None if it finds a mistake, which is kept."""
        try:
            return check(*args, **kwargs)
        except (ValueError, FileNotFoundError) as mistake:
            self._errors.append(mistake)
            return None

    def refuse(self, kind: type[ValueError] = ConfigError) -> None:
        """Does nothing if no mistake was found.

        Raises:
            ValueError: of `kind`, with the lines of all mistakes, each once; the mistake itself, if
                it is the only one.
            FileNotFoundError: likewise the only one.
        """
        lines = dict.fromkeys(map(str, self._errors))
        if len(lines) == 1:
            raise self._errors[0]
        if lines:
            raise kind("\n".join(lines))


def overlap(key: str, other: str) -> bool:
    """Whether two dotted keys are the same, or one is in the other's table."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


@dataclass(frozen=True)
class Mistake:
    """What is wrong with one key; `value` is ABSENT where none was given or it does not matter."""

    path: Path
    what: str
    value: object = ABSENT

    def __str__(self) -> str:
        """`path = value: what`."""
        key = ".".join(map(str, self.path)) or "the configuration"
        return f"{key}{'' if self.value is ABSENT else f' = {_short(self.value)}'}: {self.what}"


def unknown_key(path: Path, prefix: str = "") -> Mistake:
    """The mistake of setting `path`, which does not exist; `prefix` goes before suggested keys."""
    meant = [prefix + key for key in nearest_keys(path)]
    if meant:
        return Mistake(path, f"unknown; did you mean {' or '.join(meant)}?")
    table = ".".join(map(str, path[:-1]))
    names = sibling_names(path)
    has = f"; {table or 'the configuration'} has {', '.join(names)}" if names else ""
    return Mistake(path, f"unknown{has}")


def explain_validation(error: ValidationError, tree: Mapping[str, Any]) -> Iterator[Mistake]:
    """Every mistake that pydantic found in `tree`, in the order of the schema."""
    for detail in error.errors(include_url=False):
        path: Path = detail["loc"]
        cause = detail.get("ctx", {}).get("error")
        if detail["type"] == "too_short" and detail["input"]:
            # Pydantic counts only the valid elements; the others have been told.
            continue
        if isinstance(cause, TableError):
            yield from explain_problems(cause.found, tree, path)
        elif detail["type"] == "extra_forbidden":
            yield unknown_key(path)
        else:
            setting = find_setting(path)
            assert setting is not None, f"pydantic names a key that its schema lacks: {path}"
            if detail["type"] == "missing":
                yield Mistake(path, _missing(setting))
            else:
                yield Mistake(path, _invalid(setting, detail["input"]), detail["input"])


def explain_problems(
    problems: Sequence[Problem], tree: Mapping[str, Any], table: Path = ()
) -> Iterator[Mistake]:
    """The mistakes that a validator of ours found in `table`, with the values from `tree`."""
    for key, what in problems:
        path = (*table, *(key.split(".") if key else ()))
        value = value_at(tree, path)
        # A whole table is too long to be repeated.
        yield Mistake(path, what, ABSENT if isinstance(value, Mapping) else value)


def _missing(setting: Setting) -> str:
    if setting.type == "object":
        children = list(setting.children())
        needed = [child.path for child in children if child.required]
        if needed:
            return f"missing; this table needs {', '.join(needed)}"
        return f"missing; this table has {', '.join(child.path for child in children)}"
    return f"missing; must be {setting.allowed} ({setting.description})"


def _invalid(setting: Setting, value: object) -> str:
    nearest = nearest_value(setting, value)
    if nearest is not None:
        return f"must be {setting.allowed}; nearest valid: {nearest}"
    if setting.default is not None and setting.type != "object":
        return f"must be {setting.allowed}; default: {show_value(setting.default)}"
    return f"must be {setting.allowed}"


def value_at(tree: Mapping[str, Any], path: Path) -> object:
    """What stands at `path`, ABSENT if nothing does."""
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
