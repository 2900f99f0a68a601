"""Dataset rows, the checks that find malformed ones, and the report on excluded rows.

Independent of files, hubs and templates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SHOWN_ROWS = 10


class DataError(ValueError):
    """The dataset cannot be used; the message is for the user."""


@dataclass(frozen=True)
class Row:
    """A valid row.

    Attributes:
        number: number of the row, from 1; in a JSONL file the line number.
        values: values by column; those of required columns are text.
    """

    number: int
    values: Mapping[str, object]


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


def clean_row(row: Row, *, columns: Sequence[str]) -> Row | Malformed:
    """The row with the values of `columns` as text; Malformed if one of them is invalid."""
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
            return Malformed(row.number, f"column {column!r} contains a lone surrogate")
        texts[column] = text
    return Row(row.number, {**row.values, **texts})


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


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
