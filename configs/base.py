"""What every table of the configuration is made of: strictness, types, collected problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

HANDLES = ("hf://", "kaggle://")
"""What a model's path begins with when it is on a hub."""

# With one slash, too: a path of the file system hardly begins so, and a mistyped URL does.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}")
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_DURATION_UNITS_S = (86_400, 3_600, 60, 1)
_LONGEST_DAYS = 36_500
_LONGEST_S = _LONGEST_DAYS * 86_400

Problem = tuple[str, str]
"""A dotted key below the table that was checked ("" is the table itself), and what is wrong."""


class Table(BaseModel):
    """A TOML table: immutable, of exact types, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# What the patterns mean, for people; read by configs.settings.
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
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Field(strict=False)]


class TableError(ValueError):
    """All that one validator found wrong with a table.

    Attributes:
        found: the problems, in the order of the checks.
    """

    def __init__(self, found: Iterable[Problem]) -> None:
        """Keeps `found`; the message is one line with all of it."""
        self.found = tuple(found)
        super().__init__("; ".join(f"{key}: {what}" if key else what for key, what in self.found))


def scheme_problem(path: str, handles: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a path that is a URL; None: it is not, or begins with one of `handles`."""
    scheme = _SCHEME.match(path)
    if scheme is None or path.startswith(handles):
        return None
    hubs = f", {' and '.join(handles)}" if handles else ""
    return (
        f"{scheme.group()} is not supported; supported are paths in the file system{hubs}; mount "
        "or download what is elsewhere"
    )


def checked(problem: Callable[[str], str | None]) -> AfterValidator:
    """A check of one setting by itself, which no mistake in the rest of its table hides.

    Args:
        problem: says what is wrong with a value; None: nothing.
    """

    def check(value: str) -> str:
        what = problem(value)
        refuse([] if what is None else [("", what)])
        return value

    return AfterValidator(check)


LocalPath = Annotated[Text, checked(scheme_problem)]
ModelPath = Annotated[Text, checked(lambda path: scheme_problem(path, HANDLES))]


def refuse(problems: list[Problem]) -> None:
    """Does nothing if there are no problems.

    Raises:
        TableError: with all of them, if there are any.
    """
    if problems:
        raise TableError(problems)


def parse_duration_s(text: str) -> int:
    """Seconds in a duration such as `9h`, `1h30m` or `90s`.

    Raises:
        ValueError: if `text` is not of that form, is zero or longer than a century.
    """
    match = _DURATION.fullmatch(text)
    amounts = match.groups(default="0") if match else ("0",) * 4
    # Python reads no number of thousands of digits.
    amounts = tuple(n.lstrip("0")[: len(str(_LONGEST_S)) + 1] or "0" for n in amounts)
    seconds = sum(int(n) * unit for n, unit in zip(amounts, _DURATION_UNITS_S, strict=True))
    if seconds == 0:
        raise ValueError(f"{text!r} is not a duration; write for example '9h', '1h30m' or '90s'")
    if seconds > _LONGEST_S:
        raise ValueError(f"{text!r} is longer than a century; nearest valid: '{_LONGEST_DAYS}d'")
    return seconds


def nearest_multiples(value: int, divisor: int) -> str:
    """The positive multiples of `divisor` around `value`, in words."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
