"""Draws small charts as SVG that is part of an HTML page: its text and colours follow the page.

Colours are CSS variables of the page: `--muted` for text and axes, `--grid`, and `--s1` to `--s8`
for series. The SVG loads nothing and has no ids that another chart of the page has.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes

# Without pyplot a figure uses Agg, which needs no display.
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from scipy.stats import t

from pipeline.evaluate.significance import LEVEL

Points = Sequence[tuple[float, float]]
Scale = Literal["linear", "percent"]

COLOURS = 8
MOST_POINTS = 240
"""Points of a line in a chart; more are averaged."""
_SMOOTHED_FROM = 12
"""Points from which on a line is smoothed."""
_WIDTH, _HEIGHT = 5.0, 2.7
"""Inches; the page scales a chart to its column."""
_TIME_WIDTH = 6.2
"""Inches of a chart over time, whose column is wider."""
_PLAIN = StrMethodFormatter("{x:.4g}")
_MUTED, _GRID = "#010101", "#020202"
_SERIES = tuple(f"#03030{number}" for number in range(COLOURS))
"""Placeholders of the page's variables."""
_VARIABLES = {
    _MUTED: "var(--muted)",
    _GRID: "var(--grid)",
    **{colour: f"var(--s{number})" for number, colour in enumerate(_SERIES, start=1)},
}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "text.color": _MUTED,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        label: in the key.
        points: x and y, ascending.
        low, high: the interval of each point; empty: none is given.
        marked: whether points are drawn as measurements with their intervals; else as a line, and
            a noisy one also smoothed.
        colour: from 0; below `COLOURS`.
        noisy: whether many points are smoothed.
    """

    label: str
    points: Points
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marked: bool = False
    colour: int = 0
    noisy: bool = True


@dataclass(frozen=True)
class Panel:
    """A chart.

    Attributes:
        title: what it shows.
        series: its lines; stacked, areas above one another.
        scale: of the y axis.
        stacked: whether to stack the series, which then have the same x.
        bounds: horizontal lines, e.g. a limit.
        resumes: x of dotted vertical lines.
        changes: x of dash-dotted vertical lines.
        x: label of the x axis.
        note: below the chart.
    """

    title: str
    series: Sequence[Series]
    scale: Scale = "linear"
    stacked: bool = False
    bounds: Sequence[float] = ()
    resumes: Sequence[float] = ()
    changes: Sequence[float] = ()
    x: str = "step"
    note: str = ""


@dataclass(frozen=True)
class Span:
    """A part of the time axis with the shares of its uses.

    Attributes:
        start: its begin.
        end: its end.
        values: in the order of the chart's labels.
    """

    start: float
    end: float
    values: Sequence[float]


def smooth(points: Points) -> tuple[Points, Sequence[float], Sequence[float]]:
    """Centred moving means over a tenth of the points, and the 95% t-intervals of these means.

    Intervals of metrics that are never negative end at 0.
    """
    ys = [y for _, y in points]
    half = max(2, len(ys) // 20)
    windows = [ys[max(0, at - half) : at + half + 1] for at in range(len(ys))]
    means = [fmean(window) for window in windows]
    reach = [
        float(t.ppf((1 + LEVEL) / 2, len(window) - 1)) * stdev(window) / sqrt(len(window))
        for window in windows
    ]
    line = [(x, mean) for (x, _), mean in zip(points, means, strict=True)]
    least = 0.0 if min(ys) >= 0 else -inf
    low = [max(least, mean - own) for mean, own in zip(means, reach, strict=True)]
    return line, low, [mean + own for mean, own in zip(means, reach, strict=True)]


def thin(points: Points, *, most: int = MOST_POINTS) -> Points:
    """At most so many points: means of neighbours, at their mean x."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in chunk), fmean(y for _, y in chunk)) for chunk in chunks]


def chart(panel: Panel, *, name: str) -> str:
    """Draws a chart over steps as an `<svg>` element.

    Args:
        panel: what to draw.
        name: unique on the page; letters, digits and hyphens.
    """
    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        axes.yaxis.set_major_formatter(
            PercentFormatter(1.0, decimals=None) if panel.scale == "percent" else _PLAIN
        )
        if panel.stacked:
            _areas(axes, panel.series)
        else:
            for series in panel.series:
                _line(axes, series)
        for bound in panel.bounds:
            axes.axhline(bound, color=_MUTED, linestyle=(0, (4, 3)), linewidth=1)
        for xs, dashes in ((panel.resumes, (1, 2)), (panel.changes, (5, 2, 1, 2))):
            for x in xs:
                axes.axvline(x, color=_MUTED, linestyle=(0, dashes), linewidth=1)
        _finish(axes, panel.x)
        return _svg(figure, name, panel.title)


def time_chart(
    spans: Sequence[Span], *, colours: Sequence[int], name: str, title: str, x: str
) -> str:
    """Draws shares over time, each span as wide as it lasted, as an `<svg>` element.

    Args:
        spans: in their order.
        colours: of the values of a span, each from 0.
        name: as of `chart`.
        title: for screen readers.
        x: label of the time axis.
    """
    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_TIME_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        edges = [span.start for span in spans]
        widths = [span.end - span.start for span in spans]
        bottoms = [0.0] * len(spans)
        for number, colour in enumerate(colours):
            shares = [_share(span.values, number) for span in spans]
            axes.bar(
                edges, shares, widths, bottoms, align="edge", color=_SERIES[colour], linewidth=0
            )
            bottoms = [below + share for below, share in zip(bottoms, shares, strict=True)]
        axes.set_ylim(0, 1)
        axes.set_xlim(edges[0], spans[-1].end)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _finish(axes, x, whole=False)
        return _svg(figure, name, title)


def _share(values: Sequence[float], number: int) -> float:
    total = sum(values)
    return values[number] / total if total else 0.0


def _line(axes: Axes, series: Series) -> None:
    colour = _SERIES[series.colour]
    if series.marked:
        xs, ys = zip(*series.points, strict=True)
        errors = None
        if series.low:
            errors = (
                [max(y - low, 0.0) for y, low in zip(ys, series.low, strict=True)],
                [max(high - y, 0.0) for y, high in zip(ys, series.high, strict=True)],
            )
        # Two points say nothing about the values between them.
        style = "-" if len(xs) > 2 else ":"
        axes.errorbar(
            xs, ys, errors, color=colour, marker="o", markersize=5, linestyle=style, capsize=3
        )
        return
    points = thin([(x, y) for x, y in series.points if isfinite(y)])
    if not points:
        return
    xs, ys = zip(*points, strict=True)
    if series.low:
        edges = [(low, high) for low, high in zip(series.low, series.high, strict=True)]
        lows = thin([(x, low) for (x, _), (low, _) in zip(series.points, edges, strict=True)])
        highs = thin([(x, high) for (x, _), (_, high) in zip(series.points, edges, strict=True)])
        axes.fill_between(
            [x for x, _ in lows],
            [y for _, y in lows],
            [y for _, y in highs],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
        axes.plot(xs, ys, color=colour, linewidth=2)
    elif series.noisy and len(points) >= _SMOOTHED_FROM:
        line, low, high = smooth(points)
        axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.45)
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(xs, [y for _, y in line], color=colour, linewidth=2)
    else:
        few = len(points) < _SMOOTHED_FROM
        axes.plot(xs, ys, color=colour, linewidth=2, marker="o" if few else "", markersize=4)


def _areas(axes: Axes, stacked: Sequence[Series]) -> None:
    thinned = [thin(series.points) for series in stacked]
    xs = [x for x, _ in thinned[0]]
    colours = [_SERIES[series.colour] for series in stacked]
    rows = [[y for _, y in points] for points in thinned]
    axes.stackplot(xs, *rows, colors=colours, linewidth=0)


def _finish(axes: Axes, x: str, *, whole: bool = True) -> None:
    axes.set_xlabel(x)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.margins(x=0.02)


def _rounded(tag: re.Match[str]) -> str:
    """A tag with one decimal in its numbers; labels, which are between tags, are kept."""
    return re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}", tag[0])


def _svg(figure: Figure, name: str, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # The style would hold for the whole page, and the metadata names resources.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    label = title.replace("&", "and").replace('"', "'").replace("<", "")
    text = re.sub(r"<svg[^>]*>", f'<svg {size[0]} role="img" aria-label="{label}">', text, count=1)
    text = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", text)
    text = re.sub(r'id="([mp][0-9a-f]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"xlink:href=\"#", f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"<[^>]*>", _rounded, text)
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, variable)
    text = re.sub(r"<g/>|<defs>\s*</defs>| transform=\"rotate\(-?0 [^)]*\)\"", "", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    # The lines of a path need no command after the first.
    return re.sub(r'd="[MLz\d. -]*"', lambda path: path[0].replace(" L ", " "), text)
