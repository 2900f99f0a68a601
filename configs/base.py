"""Building blocks of every configuration table: the base class, field types, paths.

A submitted job runs in a temporary copy of the working directory, so that relative paths become
absolute when a configuration is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

HOME_VARIABLE = "GEMMA_GRPO_HOME"
"""Environment variable of the base folder of relative paths."""
HUB_PREFIXES = ("hf://", "kaggle://")
"""Prefixes of model paths on a hub."""
DATA_FILES = (".jsonl", ".parquet")
"""Endings of local data files; other paths of data are datasets on the hub."""

# One slash matches too: a mistyped URL looks like this, a file system path hardly does.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}")
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_DURATION_UNITS_S = (86_400, 3_600, 60, 1)
_LONGEST_DAYS = 36_500
_LONGEST_S = _LONGEST_DAYS * 86_400

Problem = tuple[str, str]
"""A dotted key relative to the checked table ("" is the table itself), and the problem."""


class TableError(ValueError):
    """All problems that one validator found in a table.

    Attributes:
        problems: in the order of the checks.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Stores `problems`; the message joins them into one line."""
        self.problems = tuple(problems)
        lines = (f"{key}: {what}" if key else what for key, what in self.problems)
        super().__init__("; ".join(lines))


class Table(BaseModel):
    """A TOML table: immutable, strictly typed, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[Problem]:
        """Yields a problem for each setting that does not suit the others of the table."""
        yield from ()

    def changed(self, *keys: str) -> list[str]:
        """Those of the keys whose values are not the defaults."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default()]

    def unused(self, *keys: str, why: str) -> Iterator[Problem]:
        """Yields a problem for each of the keys that is set; `why` begins with a preposition."""
        for key in self.changed(*keys):
            yield key, f"has no effect {why}; remove it"

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        problems = tuple(self.conflicts())
        if problems:
            raise TableError(problems)
        return self


# Descriptions of the patterns in words; `configs.settings` reads them.
_SLUG = "of letters, digits, '.', '_' and '-' that begins with a letter or digit"
_FUNCTION = "of the form file.py:function or module:function"

Slug = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", json_schema_extra={"words": _SLUG})
]
FunctionName = Annotated[
    str, Field(pattern=r"^([\w.]+|.+\.py):\w+$", json_schema_extra={"words": _FUNCTION})
]
Text = Annotated[str, Field(min_length=1)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
PositiveInts = Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Field(strict=False)]


def scheme_problem(path: str, handles: tuple[str, ...] = ()) -> str | None:
    """Describes what is wrong with a path that is a URL; None if it is valid.

    Args:
        path: the path.
        handles: URL prefixes that are allowed.
    """
    scheme = _SCHEME.match(path)
    if scheme is None or path.startswith(handles):
        return None
    hubs = f", {' and '.join(handles)}" if handles else ""
    return (
        f"{scheme.group()} is not supported; supported are file system paths{hubs}; mount or "
        "download data that is stored elsewhere"
    )


def checked(problem: Callable[[str], str | None]) -> AfterValidator:
    """A pydantic validator of a single setting; it runs even if other settings are invalid.

    Args:
        problem: describes what is wrong with a value; None if it is valid.
    """

    def check(value: str) -> str:
        what = problem(value)
        if what is not None:
            raise TableError([("", what)])
        return value

    return AfterValidator(check)


def home() -> Path:
    """The base folder of relative paths: $GEMMA_GRPO_HOME, else the current directory."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.cwd()).absolute()


def _absolute(path: str) -> str:
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise TableError([("", "there is no such user; write the whole path")]) from None
    # normpath, not resolve: the run folder may be a link whose target changes between resumes.
    return os.path.normpath(home() / expanded)


def is_handle(path: str) -> bool:
    """Whether `path` is a hub model handle, not a folder."""
    return path.startswith(HUB_PREFIXES)


LocalPath = Annotated[Text, checked(scheme_problem), AfterValidator(_absolute)]
DataPath = Annotated[
    Text,
    checked(scheme_problem),
    AfterValidator(lambda path: _absolute(path) if path.endswith(DATA_FILES) else path),
]
ModelPath = Annotated[
    Text,
    checked(lambda path: scheme_problem(path, HUB_PREFIXES)),
    AfterValidator(lambda path: path if is_handle(path) else _absolute(path)),
]


def parse_duration_s(text: str) -> int:
    """Seconds in a duration such as `9h`, `1h30m` or `90s`.

    Raises:
        ValueError: if `text` has another form, is zero or longer than a century.
    """
    match = _DURATION.fullmatch(text)
    amounts = match.groups(default="0") if match else ("0",) * 4
    # Python refuses to parse integers of more than 4,300 digits.
    amounts = tuple(n.lstrip("0")[: len(str(_LONGEST_S)) + 1] or "0" for n in amounts)
    seconds = sum(int(n) * unit for n, unit in zip(amounts, _DURATION_UNITS_S, strict=True))
    if seconds == 0:
        raise ValueError(f"{text!r} is not a duration; write for example '9h', '1h30m' or '90s'")
    if seconds > _LONGEST_S:
        raise ValueError(f"{text!r} is longer than a century; nearest valid: '{_LONGEST_DAYS}d'")
    return seconds


def nearest_multiples(value: int, divisor: int) -> str:
    """The positive multiples of `divisor` next to `value`, in words."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
