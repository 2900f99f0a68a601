"""What a dataset's row is before it becomes a prompt, and what makes one unusable.

Knows nothing of files, of the hub or of templates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class DataError(ValueError):
    """The dataset cannot be used as it is; one clear sentence for the user."""


@dataclass(frozen=True)
class Row:
    """A row that can be used.

    Attributes:
        number: which row, counted from 1; in a JSONL file the line.
        values: its columns; those asked for are text.
    """

    number: int
    values: Mapping[str, object]


@dataclass(frozen=True)
class Malformed:
    """A row that cannot be used: its number, counted from 1, and why."""

    row: int
    reason: str


def clean_row(row: Row, *, columns: Sequence[str]) -> Row | Malformed:
    """The row with the values of `columns` as text, or what is wrong with one of them."""
    texts = {}
    for column in columns:
        value = row.values.get(column)
        if value is None:
            state = "null" if column in row.values else "missing"
            return Malformed(row.number, f"column {column!r} is {state}")
        if not isinstance(value, str | int | float):
            kind = type(value).__name__
            return Malformed(row.number, f"column {column!r} is a {kind}, not text or a number")
        if isinstance(value, float) and not math.isfinite(value):
            return Malformed(row.number, f"column {column!r} is {value}, not a number")
        text = str(value)
        if not text.strip():
            return Malformed(row.number, f"column {column!r} is empty")
        if not _is_unicode(text):
            return Malformed(row.number, f"column {column!r} holds half a surrogate pair")
        texts[column] = text
    return Row(row.number, {**row.values, **texts})


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
