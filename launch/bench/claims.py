"""Claims that several benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launch.bench.table import Claim, Figures


def invariant_3(found: Mapping[str, Figures]) -> Iterator[Claim]:
    """Claims that no buffer of the compiled programs holds whole logits."""
    whole = [name for name, row in found.items() if row.get("invariant_3") is False]
    if any("invariant_3" in row for row in found.values()):
        yield Claim(
            "no buffer holds the vocabulary x more than 2,048 others"
            + (f"; {', '.join(whole)} do" if whole else ""),
            not whole,
        )
