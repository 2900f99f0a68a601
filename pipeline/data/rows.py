"""Dataset rows, the checks that find malformed ones, and the report on excluded rows.

Independent of files, hubs and templates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

SHOWN_ROWS = 10
_MOST_DIGITS = 100
_KINDS = {
    "NoneType": "null",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a text",
    "list": "a list",
    "dict": "an object",
}


class DataError(ValueError):
    """The dataset cannot be used; the message is for the user."""


@dataclass(frozen=True)
class Row:
    """A valid row.

    Attributes:
        number: number of the row, from 1; in a JSONL or CSV file the line number.
        values: values by column; those of required columns are text.
        messages: the turns of a prompt in chat format, each with "role" and "content": "system" at
            most first, then "user" and "assistant" in turns, "user" last; None for other rows.
        reply: the assistant's turn after them; None if there is none.
    """

    number: int
    values: Mapping[str, object]
    messages: tuple[Mapping[str, str], ...] | None = None
    reply: str | None = None


@dataclass(frozen=True)
class Malformed:
    """A malformed row: its number, from 1, and the reason."""

    row: int
    reason: str


@dataclass(frozen=True)
class TooLong:
    """An overlong row, which is excluded: its number, from 1, and its length in tokens."""

    row: int
    tokens: int


def clean_row(row: Row, *, columns: Sequence[str], chat: str | None = None) -> Row | Malformed:
    """The row with the values of `columns` as text; Malformed if one of them is invalid.

    Args:
        row: with the values of the dataset.
        columns: required columns.
        chat: column with the messages of a row in chat format; None: there is none.
    """
    texts = {}
    for column in columns:
        value = row.values.get(column)
        if value is None:
            return _absent(row, column)
        if not isinstance(value, str | int | float | Decimal):
            what = f"column {column!r} is {kind_of(value)}, not text or a number"
            return Malformed(row.number, what)
        if isinstance(value, float | Decimal) and not math.isfinite(value):
            return Malformed(row.number, f"column {column!r} is {value}, not a number")
        texts[column] = _text_of(value)
        problem = _text_problem(texts[column])
        if problem:
            return Malformed(row.number, f"column {column!r} {problem}")
    cleaned = Row(row.number, {**row.values, **texts})
    if chat is None:
        return cleaned
    if row.values.get(chat) is None:
        return _absent(row, chat)
    try:
        messages = parse_messages(row.values[chat])
    except ValueError as problem:
        return Malformed(row.number, f"column {chat!r} {problem}")
    replied = messages[-1]["role"] == "assistant"
    return replace(
        cleaned,
        messages=messages[:-1] if replied else messages,
        reply=messages[-1]["content"] if replied else None,
    )


def is_chat(value: object) -> bool:
    """Whether a value is in chat format: a list that begins with a turn's role."""
    return isinstance(value, list) and any(
        isinstance(v, Mapping) and "role" in v for v in value[:1]
    )


def parse_messages(value: object) -> tuple[dict[str, str], ...]:
    """The turns of a value in chat format, with their roles and texts alone.

    Raises:
        ValueError: saying which turn is invalid; the message follows the name of the column.
    """
    if not isinstance(value, list):
        raise ValueError(f"is {kind_of(value)}, not a list of messages")
    messages = list[dict[str, str]]()
    for number, message in enumerate(value, start=1):
        where, last = f"has in message {number}", messages[-1]["role"] if messages else None
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} {kind_of(message)}, not a role and a content")
        role, content = message.get("role"), message.get("content")
        expected = {None: ["system", "user"], "user": ["assistant"]}.get(last, ["user"])
        if role not in expected:
            raise ValueError(f"{where} the role {role!r} instead of {' or '.join(expected)}")
        if not isinstance(content, str):
            kind = "no content" if content is None else kind_of(content)
            raise ValueError(f"{where} {kind}, not text")
        problem = _text_problem(content)
        if problem:
            raise ValueError(f"{where} a text that {problem}")
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("has no message of the user")
    return tuple(messages)


def _text_of(value: str | float | Decimal) -> str:
    """The text of a value; numbers in digits: 0.00001, not 1e-05."""
    if not isinstance(value, float | Decimal):
        return str(value)
    digits = f"{Decimal(str(value)):f}"
    return digits if len(digits) <= _MOST_DIGITS else str(value)


def _absent(row: Row, column: str) -> Malformed:
    state = "null" if column in row.values else "missing"
    return Malformed(row.number, f"column {column!r} is {state}")


def _text_problem(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    return None if is_unicode(text) else "contains a lone surrogate"


def refuse_malformed(
    malformed: Sequence[Malformed], *, path: str, where: str, policy: Literal["refuse", "skip"]
) -> None:
    """Refuses malformed rows unless `policy` is to skip them.

    Raises:
        DataError: with the first 10 malformed rows.
    """
    if malformed and policy == "refuse":
        rows = "row is" if len(malformed) == 1 else "rows are"
        lines = [
            f"{where}: {len(malformed)} {rows} malformed in {path}:",
            *_list_rows(malformed),
            'fix them, or exclude them with data.malformed = "skip"',
        ]
        raise DataError("\n".join(lines))


def report_lines(
    title: str, *, malformed: Sequence[Malformed], too_long: int, overlaps: int, duplicates: int
) -> Iterator[str]:
    """A line with the counts of excluded rows, and one for each of the first 10 malformed rows."""
    counts = {
        "malformed": len(malformed),
        "too long": too_long,
        "in a later split": overlaps,
    }
    excluded = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    yield (
        title
        + (f", excluded: {excluded}" if excluded else "")
        + (f", duplicates kept: {duplicates}" if duplicates else "")
    )
    yield from _list_rows(malformed)


def _list_rows(malformed: Sequence[Malformed]) -> Iterator[str]:
    for bad in malformed[:SHOWN_ROWS]:
        yield f"  row {bad.row}: {bad.reason}"
    if len(malformed) > SHOWN_ROWS:
        yield f"  and {len(malformed) - SHOWN_ROWS} more"


def kind_of(value: object) -> str:
    """The kind of a value in JSON's terms, with its article."""
    name = type(value).__name__
    return _KINDS.get(name, f"a value of type {name}")


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
