"""Plots the results of `launch.bench sweep`: tokens a second and memory by slots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.bench.sweep_bench import POSITIONS, SMALL_POSITIONS
from pipeline.contracts.topology import HBM_GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^vDPX*"

Lines = dict[str, list[Mapping[str, Any]]]
"""The measured rows of each series, by slots."""


def write(*, file: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the plot as PNG, whatever the file's extension; nothing if no row has figures yet.

    Args:
        file: replaced atomically.
        content: the content of `--json`.

    Returns:
        `written`: whether a plot was written.
    """
    plot = figure(content)
    if plot is None:
        return {"written": False}
    path = Path(file)
    partial = path.with_name(path.name + ".partial")
    plot.savefig(partial, format="png", dpi=150)
    partial.replace(path)
    return {"written": True}


def figure(content: Mapping[str, Any]) -> Figure | None:
    """Returns two panels per place with figures; None if there are no figures."""
    # Without pyplot a figure uses Agg, which needs no display.
    from matplotlib.figure import Figure

    places = _places(content["sections"])
    if not places:
        return None
    plot = Figure(figsize=(13, 4.6 * len(places)), layout="constrained")
    parts = plot.subfigures(len(places), 1, squeeze=False)[:, 0]
    for part, (place, lines) in zip(parts, places.items(), strict=True):
        part.suptitle(_title(place, lines, content), fontsize=11)
        speed, memory = part.subplots(1, 2)
        key, unit = ("total_gib", "GiB") if place == "v5e" else ("total_mib", "MiB")
        _panel(speed, lines, "tokens_per_s", "tokens a second")
        _panel(memory, lines, key, f"memory, {unit}")
        handles, names = speed.get_legend_handles_labels()
        if place == "v5e":
            limit = memory.axhline(HBM_GIB, color="black", linestyle="--", linewidth=1)
            memory.set_ylim(top=1.1 * HBM_GIB)
            handles.append(limit)
            names.append(f"the chip: {HBM_GIB} GiB")
        part.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)
    return plot


def _places(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Lines]:
    found: dict[str, Lines] = {}
    for rows in sections.values():
        for row in rows.values():
            if "tokens_per_s" in row:
                found.setdefault(row["place"], {}).setdefault(row["series"], []).append(row)
    for lines in found.values():
        for points in lines.values():
            points.sort(key=lambda row: row["slots"])
    return found


def _title(place: str, lines: Lines, content: Mapping[str, Any]) -> str:
    unless = "positions unless a line says otherwise"
    if place == "v5e":
        return (
            f"gemma3-1b, {POSITIONS:,} {unless}\non one TPU v5e chip: "
            "the compiler's estimates, not measurements"
        )
    device = next(iter(lines.values()))[0]["device"]
    on = content["machine"] if place == "cpu" else device
    return (
        f"A small Gemma 3 (7 layers, width 128, 512 entries, float32), {SMALL_POSITIONS} "
        f"{unless}\nmeasured on {on}"
    )


def _panel(axes: Axes, lines: Lines, key: str, label: str) -> None:
    """Plots one line per series over slots, on a logarithmic axis."""
    slots = [row["slots"] for points in lines.values() for row in points]
    for number, (series, points) in enumerate(lines.items()):
        axes.plot(
            [row["slots"] for row in points],
            [row[key] for row in points],
            label=series,
            color=f"C{number}",
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linewidth=1.3,
            # Two points say nothing about the values between them.
            linestyle="-" if len(points) > 2 else ":",
        )
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(max(slots).bit_length() + 1)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlim(min(slots) / 1.15, max(slots) * 1.15)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("slots: rollouts decoded at once")
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)
