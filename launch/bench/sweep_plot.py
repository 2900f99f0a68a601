"""Plots the figures of `launch.bench sweep`: tokens a second and memory by slots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

# Without pyplot a figure uses Agg, which needs no display.
from matplotlib.figure import Figure

from launch.bench.rollout import LENGTH
from launch.bench.small_gemma import NEW, PROMPT
from pipeline.plan.topology import HBM_GIB

_MARKERS = "os^vDPX*"


def write_plot(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the plot as PNG, whatever the file's extension; nothing if no row has figures yet.

    Args:
        path: replaced atomically.
        content: the content of `--json`.
    """
    plot = figure(content)
    if plot is not None:
        partial = path.with_name(path.name + ".partial")
        plot.savefig(partial, format="png", dpi=150)
        partial.replace(path)


def figure(content: Mapping[str, Any]) -> Figure | None:
    """Returns two panels per place with figures; None if there are no figures."""
    places: dict[str, dict[str, Any]] = {}
    for section, rows in content["sections"].items():
        found = {name: row for name, row in rows.items() if "tokens_per_s" in row}
        if found:
            places.setdefault(section.partition(" ")[0], {}).update(found)
    if not places:
        return None
    plot = Figure(figsize=(13, 4.6 * len(places)), layout="constrained")
    panels = plot.subplots(len(places), 2, squeeze=False)
    for (speed, memory), (place, rows) in zip(panels, places.items(), strict=True):
        speed.set_title(_title(place, rows, content), fontsize=9)
        _lines(speed, rows, "tokens_per_s", "tokens a second")
        if place == "v5e":
            _lines(memory, rows, "gib", "memory, GiB")
            memory.axhline(HBM_GIB, color="black", linestyle="--", linewidth=1)
            memory.set_title(f"dashed: the chip, {HBM_GIB} GiB", fontsize=9)
            memory.set_ylim(top=1.1 * HBM_GIB)
        else:
            _lines(memory, rows, "mib", "memory beside weights, MiB")
        memory.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    return plot


def _title(place: str, rows: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    unless = "positions unless a line says otherwise"
    if place == "v5e":
        return f"gemma3-1b, {LENGTH:,} {unless}\none TPU v5e chip: estimates, not measurements"
    device = next(iter(rows.values()))["device"]
    where = content["machine"] if place == "cpu" else device
    return f"a small Gemma 3, {PROMPT + NEW} {unless}\nmeasured on {where}"


def _lines(axes: Axes, rows: Mapping[str, Any], key: str, label: str) -> None:
    """Plots one line per series over slots, on a logarithmic axis."""
    series: dict[str, list[tuple[int, float]]] = {}
    for name, row in rows.items():
        series.setdefault(name.rpartition(", ")[0], []).append((row["slots"], row[key]))
    for number, (name, points) in enumerate(series.items()):
        slots, values = zip(*sorted(points), strict=True)
        axes.plot(
            slots,
            values,
            label=name,
            marker=_MARKERS[number % len(_MARKERS)],
            # Two points say nothing about the values between them.
            linestyle="-" if len(points) > 2 else ":",
        )
    ticks = sorted({row["slots"] for row in rows.values()})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("slots: rollouts decoded at once")
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)
