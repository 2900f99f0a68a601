"""Tables of text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0, -1)) -> Iterator[str]:
    """Aligned columns; all but those in `left` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    starts = {number % len(widths) for number in left}
    for row in rows:
        cells = [
            cell.ljust(width) if number in starts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
