"""Draws small charts as SVG that is part of an HTML page: its text and colours follow the page.

Colours are CSS variables of the page: `--muted` for text and axes, `--grid`, and `--s1` to `--s8`
for series. The SVG loads nothing.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

# Without pyplot a figure uses Agg, which needs no display.
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

Points = Sequence[tuple[float, ...]]
"""x, y by ascending x; of measured points x, y, low, high."""

COLOURS = 8
MOST_POINTS = 240
"""Points of a line in a chart; more are averaged."""
_SMOOTHED_FROM = 12
"""Points from which on a line is smoothed."""
_INCHES = (5.0, 2.7)
"""Width and height; the page scales a chart to its column."""
_MUTED, _GRID = "#010101", "#020202"
_SERIES = [f"#03030{number}" for number in range(COLOURS)]
_VARIABLES = {_MUTED: "muted", _GRID: "grid"} | {
    colour: f"s{number}" for number, colour in enumerate(_SERIES, start=1)
}
"""Variables of the page by the colours that stand for them in a figure."""
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "grid.color": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclass(frozen=True)
class Series:
    """A line of a chart; if `measured` each point is a mark with its interval."""

    label: str
    points: Points
    colour: int = 0
    measured: bool = False


@dataclass(frozen=True)
class Panel:
    """A chart: its title, unique on the page, its lines, of shares or not, and a note below it."""

    title: str
    series: Sequence[Series] = ()
    percent: bool = False
    note: str = ""


def lines(points: Mapping[str, Points]) -> list[Series]:
    """A line for each label that has points; a label keeps its colour whatever the others have."""
    return [
        Series(label, found, number % COLOURS)
        for number, (label, found) in enumerate(points.items())
        if found
    ]


def smooth(points: Points) -> Points:
    """Centred moving means over a tenth of the points."""
    ys = [point[1] for point in points]
    half = max(2, len(ys) // 20)
    return [(x, fmean(ys[max(0, at - half) : at + half + 1])) for at, (x, *_) in enumerate(points)]


def thin(points: Points) -> Points:
    """At most `MOST_POINTS` points: means of neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [tuple(map(fmean, zip(*chunk, strict=True))) for chunk in chunks]


def chart(panel: Panel, *, resumes: Sequence[float] = ()) -> Markup:
    """Draws a chart as an `<svg>` element; `resumes` are x of dotted vertical lines."""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": panel.title}):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots()
        for series in panel.series:
            _line(axes, series)
        for x in resumes:
            axes.axvline(x, color=_MUTED, linestyle=(0, (1, 2)), linewidth=1)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(
            PercentFormatter(1.0, decimals=None) if panel.percent else StrMethodFormatter("{x:.4g}")
        )
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.margins(x=0.02)
        return _svg(figure, panel.title)


def _line(axes: Axes, series: Series) -> None:
    colour = _SERIES[series.colour]
    if series.measured:
        xs, ys, lows, highs = zip(*series.points, strict=True)
        reach = np.maximum([np.subtract(ys, lows), np.subtract(highs, ys)], 0.0)
        # Two points say nothing about the values between them.
        style = "-" if len(xs) > 2 else ":"
        axes.errorbar(xs, ys, reach, color=colour, marker="o", ms=5, linestyle=style, capsize=3)
        return
    points = thin(series.points)
    few = len(points) < _SMOOTHED_FROM
    xs, ys = zip(*points, strict=True)
    if not few:
        axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.45)
        xs, ys = zip(*smooth(points), strict=True)
    axes.plot(xs, ys, color=colour, linewidth=2, marker="o" if few else "", markersize=4)


def _svg(figure: Figure, title: str) -> Markup:
    """The figure as an element of a page: without what it loads, and with the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    loaded = r"<metadata>.*?</metadata>|<style.*?</style>"
    text = re.sub(loaded, "", buffer.getvalue(), flags=re.DOTALL)
    _, size, text = re.split(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', text, maxsplit=1)
    # Only markers and clip paths need an id; theirs is a hash of their content and the title.
    text = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", text)
    text = re.sub(r"\s+", " ", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return Markup(f'<svg {size} role="img" aria-label="{html.escape(title)}">{text}')
