"""A benchmark: sections of rows, each measured in a child process and shown as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Figures: TypeAlias = Mapping[str, Any]
"""Measured figures of a row, by name."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: unique in its section; shown in the first column.
        function: `module:function` that measures in a child process, see `launch.bench.child`.
        arguments: its keyword arguments.
        environment: variables of the child, added to this process's.
        known: figures that need no measurement.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    known: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """One figure of the rows: key, title and format."""

    key: str
    title: str
    form: str = "{}"

    def cell(self, figures: Figures) -> str:
        """Returns the figure as text; empty if the row has none."""
        value = figures.get(self.key)
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return self.form.format(value)


@dataclass(frozen=True)
class Claim:
    """A claim, and whether the figures support it."""

    text: str
    holds: bool


def _no_claims(found: Mapping[str, Figures]) -> Iterable[Claim]:
    del found
    return ()


@dataclass(frozen=True)
class Section:
    """Rows with the same columns.

    Attributes:
        name: for `--only`.
        title: one line.
        columns: shown figures.
        rows: measurements.
        claims: makes the claims from the measured figures by row name.
        needs: `module:function` that runs before the rows, in a child with the first row's
            environment; if it returns `absent`, no row is measured and the reason is shown.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    claims: Callable[[Mapping[str, Figures]], Iterable[Claim]] = field(default=_no_claims)
    needs: str | None = None

    def table(self, found: Mapping[str, Figures]) -> str:
        """Returns the measured rows as a Markdown table."""
        lines = [
            "| " + " | ".join(["", *(column.title for column in self.columns)]) + " |",
            "|---|" + "---|" * len(self.columns),
        ]
        for name, figures in found.items():
            cells = [column.cell(figures) for column in self.columns]
            message = _message(figures)
            if message:
                cells = [message, *cells[1:]]
            lines.append("| " + " | ".join([name, *cells]) + " |")
        return "\n".join(lines)


def _message(figures: Figures) -> str:
    """Returns the message for a row without figures; empty if it has figures."""
    if "failed" in figures:
        return f"failed: {figures['failed']}"
    if figures.get("fits") is False:
        needs = figures["needs_gib"]
        return "does not fit" + ("" if needs is None else f" (the compiler: {needs:.2f} GiB)")
    return ""


@dataclass(frozen=True)
class Benchmark:
    """Sections that one command measures.

    Attributes:
        sections: in order.
        plot: `module:function` that plots the figures in a child process; None: no plot.
        plot_file: default file of the plot.
    """

    sections: Sequence[Section]
    plot: str | None = None
    plot_file: str = ""
