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
from typing import Literal

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

# Without pyplot a figure uses Agg, which needs no display.
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

Points = Sequence[tuple[float, ...]]
"""x, y by ascending x; with an interval x, y, low, high."""
Scale = Literal["linear", "percent"]

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
    """A line of a chart.

    Attributes:
        label: in the key.
        points: of the line.
        colour: from 0; below `COLOURS`.
        measured: whether each point is a mark with its interval.
    """

    label: str
    points: Points
    colour: int = 0
    measured: bool = False


@dataclass(frozen=True)
class Panel:
    """A chart.

    Attributes:
        title: what it shows; unique on the page.
        series: its lines.
        scale: of the y axis.
        smoothed: whether many points without intervals become a moving mean.
        stacked: whether the series are areas above one another; all have the same x.
        bound: y of a dashed line.
        x: label of the x axis.
        note: below the chart.
    """

    title: str
    series: Sequence[Series] = ()
    scale: Scale = "linear"
    smoothed: bool = True
    stacked: bool = False
    bound: float | None = None
    x: str = "step"
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


def chart(panel: Panel, *, resumes: Sequence[float] = (), changes: Sequence[float] = ()) -> Markup:
    """Draws a chart as an `<svg>` element.

    Args:
        panel: what to draw.
        resumes: x of dotted vertical lines.
        changes: x of dash-dotted vertical lines.
    """
    percent, steps = panel.scale == "percent", panel.x == "step"
    with mpl.rc_context(_STYLE | {"svg.hashsalt": panel.title}):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots()
        if panel.stacked:
            _areas(axes, panel)
        else:
            for series in panel.series:
                _line(axes, series, smoothed=panel.smoothed)
        if panel.bound is not None:
            axes.axhline(panel.bound, color=_MUTED, linestyle=(0, (4, 3)), linewidth=1)
        for xs, dashes in ((resumes, (1, 2)), (changes, (5, 2, 1, 2))):
            for x in xs:
                axes.axvline(x, color=_MUTED, linestyle=(0, dashes), linewidth=1)
        axes.set_xlabel(panel.x)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=steps))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(
            PercentFormatter(1.0, decimals=None) if percent else StrMethodFormatter("{x:.4g}")
        )
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.margins(x=0.02)
        return _svg(figure, panel.title)


def _line(axes: Axes, series: Series, *, smoothed: bool) -> None:
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
    xs, ys, *interval = zip(*points, strict=True)
    if smoothed and not interval and not few:
        axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.45)
        xs, ys = zip(*smooth(points), strict=True)
    if interval:
        low, high = interval
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(xs, ys, color=colour, linewidth=2, marker="o" if few else "", markersize=4)


def _areas(axes: Axes, panel: Panel) -> None:
    stacked = [list(zip(*thin(series.points), strict=True)) for series in panel.series]
    axes.stackplot(
        stacked[0][0],
        *(ys for _, ys in stacked),
        colors=[_SERIES[series.colour] for series in panel.series],
        linewidth=0,
    )
    if panel.scale == "percent":
        axes.set_ylim(0, 1)


def _svg(figure: Figure, title: str) -> Markup:
    """The figure as an element of a page: without what it loads, and with the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    loaded = r"<metadata>.*?</metadata>|<style.*?</style>"
    text = re.sub(loaded, "", buffer.getvalue(), flags=re.DOTALL)
    _, size, text = re.split(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', text, maxsplit=1)
    # Only markers and clip paths need an id; theirs is a hash of their content and the title.
    text = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", text)
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: _rounded(found[0]), text)
    text = re.sub(r"\s+", " ", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return Markup(f'<svg {size} role="img" aria-label="{html.escape(title)}">{text}')


def _rounded(coordinates: str) -> str:
    """Coordinates with one decimal, a tenth of a point."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", coordinates)
