"""What a rehearsal has found, as figures and as lines made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launch.rehearsal.account import Result, Row
from pipeline.contracts.topology import GIB
from pipeline.report.plan_lines import table

Figures = dict[str, Any]
"""JSON."""

_SECONDS = ("", "s planned", "from", "to", "s measured")


def report(name: str, result: Result) -> Figures:
    """All figures of a rehearsal: seconds, GiB of the fullest device.

    Args:
        name: of the run that was rehearsed.
        result: what was found.
    """
    failure = result.failure
    return {
        "name": name,
        "works": failure is None,
        "failed": None if failure is None else {"phase": failure.name, "why": failure.why},
        "sizes": result.sizes.to_json(),
        "first_sizes": result.first.to_json(),
        "device_limit_gib": _gib(result.limit_bytes),
        "phases": [_figures(row) for row in result.rows],
    }


def _figures(row: Row) -> Figures:
    planned = row.planned
    return {
        "phase": row.name,
        "planned_s": None
        if planned is None
        else {"low": planned.low, "expected": planned.expected, "high": planned.high},
        "measured_s": row.seconds,
        "planned_gib": _gib(row.planned_bytes),
        "compiled_gib": _gib(row.compiled_bytes),
        "device_peak_gib": _gib(row.peak_bytes),
        "peak_is_of_this_phase": row.is_peak,
        "note": row.note,
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def lines(figures: Figures) -> Iterator[str]:
    """The report for people: the table, what its marks mean, and what came out."""
    phases = figures["phases"]
    measured = any(phase["device_peak_gib"] is not None for phase in phases)
    yield f"rehearsal of {figures['name']}"
    yield (
        "~ estimated by the plan, with the range that it gives; compiled: by this machine's "
        "compiler, with what is on the device; all seconds measured once"
    )
    if measured:
        limit = figures["device_limit_gib"]
        of = "" if limit is None else f" of {limit:.2f} GiB"
        yield f"on the device: the most in use so far{of}; < where no more than in a phase before"
    else:
        yield "on the device: this platform does not tell what was in use"
    largest = max(
        (phase["compiled_gib"] or phase["planned_gib"] or 0 for phase in phases), default=0
    )
    unit, factor = ("GiB", 1) if largest >= 1 else ("MiB", 1024)
    head = [*_SECONDS, f"{unit} planned", "compiled", "on the device", ""]
    yield from table([head, *(_row(phase, factor) for phase in phases)])
    yield from _outcome(figures)


def _row(phase: Figures, factor: int) -> list[str]:
    seconds, bound = phase["planned_s"], "" if phase["peak_is_of_this_phase"] else "<"
    planned = ["", "", ""]
    if seconds is not None:
        planned = [f"~{_seconds(seconds[pace])}" for pace in ("expected", "low", "high")]
    sizes = [
        "" if phase[key] is None else f"{mark}{factor * phase[key]:,.2f}"
        for key, mark in (("planned_gib", "~"), ("compiled_gib", ""), ("device_peak_gib", bound))
    ]
    return [phase["phase"], *planned, _seconds(phase["measured_s"]), *sizes, phase["note"]]


def _seconds(number: float) -> str:
    return f"{number:.2f}" if number >= 1 else f"{number:.3f}"


def _outcome(figures: Figures) -> Iterator[str]:
    sizes, first = figures["sizes"], figures["first_sizes"]
    if sizes != first:
        yield f"memory ran out: it went on with {_sizes(sizes)} instead of {_sizes(first)}"
    failed = figures["failed"]
    if failed is None:
        yield f"everything fits and works with {_sizes(sizes)}"
    else:
        yield f"FAILED: {failed['phase']}: {failed['why']}"


def _sizes(sizes: Figures) -> str:
    return (
        f"plan.slots = {sizes['slots']} and plan.micro_batch_tokens = {sizes['micro_batch_tokens']}"
    )
