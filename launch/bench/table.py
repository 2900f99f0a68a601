"""What a benchmark is: sections of rows, each measured in a child process; and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Figures: TypeAlias = Mapping[str, Any]
"""What a row measured, by name."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: unique in its section; what the first column shows.
        function: `module:function` that measures in a child process, see `launch.bench.child`.
        arguments: its keyword arguments.
        environment: of the child, over this process's own.
        known: figures that are not measured.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    known: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """One figure of the rows: its key, its title, and how it is written."""

    key: str
    title: str
    form: str = "{}"

    def cell(self, figures: Figures) -> str:
        """The figure as text; empty where the row has none."""
        value = figures.get(self.key)
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return self.form.format(value)


@dataclass(frozen=True)
class Claim:
    """Something that was to be shown, and whether the figures do."""

    text: str
    holds: bool


def _nothing(found: Mapping[str, Figures]) -> Iterable[Claim]:
    del found
    return ()


@dataclass(frozen=True)
class Section:
    """Rows with the same columns.

    Attributes:
        name: by which `--only` finds it.
        title: one line.
        columns: what is shown of each row.
        rows: what is measured.
        claims: what the figures of the rows that were measured, by their names, are to show.
        needs: `module:function` that is asked before the rows, in a child with the first one's
            environment; where it returns `absent`, no row is measured, and this is said.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    claims: Callable[[Mapping[str, Figures]], Iterable[Claim]] = field(default=_nothing)
    needs: str | None = None

    def table(self, found: Mapping[str, Figures]) -> str:
        """The rows that were measured as a Markdown table."""
        lines = [
            "| " + " | ".join(["", *(column.title for column in self.columns)]) + " |",
            "|---|" + "---|" * len(self.columns),
        ]
        for name, figures in found.items():
            cells = [column.cell(figures) for column in self.columns]
            message = _instead(figures)
            if message:
                cells = [message, *cells[1:]]
            lines.append("| " + " | ".join([name, *cells]) + " |")
        return "\n".join(lines)


def _instead(figures: Figures) -> str:
    """What is said of a row that has no figures."""
    if "failed" in figures:
        return f"failed: {figures['failed']}"
    if figures.get("fits") is False:
        needs = figures["needs_gib"]
        return "does not fit" + ("" if needs is None else f" (the compiler: {needs:.2f} GiB)")
    return ""


@dataclass(frozen=True)
class Benchmark:
    """Sections that are measured by one command.

    Attributes:
        sections: one after another.
        draw: `module:function` that draws a picture of what `--json` writes, in a child.
        picture: the picture's file, unless the request names one.
    """

    sections: Sequence[Section]
    draw: str | None = None
    picture: str = ""
