"""Building blocks of every configuration table: the base class, field types, validation errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

HUB_PREFIXES = ("hf://", "kaggle://")
"""Prefixes of model paths on a hub."""

# One slash matches too: a mistyped URL looks like this, a file system path hardly does.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}")
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_DURATION_UNITS_S = (86_400, 3_600, 60, 1)
_LONGEST_DAYS = 36_500
_LONGEST_S = _LONGEST_DAYS * 86_400

Problem = tuple[str, str]
"""A dotted key relative to the checked table ("" is the table itself), and the problem."""


class Table(BaseModel):
    """A TOML table: immutable, strictly typed, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# Descriptions of the patterns in words; `configs.settings` reads them.
_SLUG = "of letters, digits, '.', '_' and '-' that begins with a letter or digit"
_FUNCTION = "of the form module:function"

Slug = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", json_schema_extra={"words": _SLUG})
]
FunctionName = Annotated[
    str, Field(pattern=r"^[\w.]+:\w+$", json_schema_extra={"words": _FUNCTION})
]
Text = Annotated[str, Field(min_length=1)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
PositiveInts = Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Field(strict=False)]


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
        refuse([] if what is None else [("", what)])
        return value

    return AfterValidator(check)


LocalPath = Annotated[Text, checked(scheme_problem)]
ModelPath = Annotated[Text, checked(lambda path: scheme_problem(path, HUB_PREFIXES))]


def refuse(problems: list[Problem]) -> None:
    """Raises an error if there are any problems.

    Raises:
        TableError: with all problems.
    """
    if problems:
        raise TableError(problems)


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
