"""Report of a rehearsal: measured time and memory of each phase beside the planned ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.schema import Config
from launch.rehearsal.expected import Expectations, Target
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.topology import GIB
from pipeline.contracts.workers import ReportsMemory
from pipeline.plan.cost_model.roofline import Seconds
from pipeline.report.plan_lines import table

Figures = dict[str, Any]
"""JSON."""

_SECONDS_HEAD = ("", "s planned", "from", "to", "s measured")


@dataclass(frozen=True)
class Row:
    """A phase that succeeded.

    Attributes:
        name: of the phase.
        seconds: measured time.
        planned: planned time; None: the plan has no estimate.
        planned_bytes: planned peak memory of a chip; None: the plan has no estimate.
        compiled_bytes: the compiler's figure plus the arrays on the device; None: no program ran.
        peak_bytes: the device's own peak up to the end of the phase; None: the platform reports
            none.
        is_peak: whether the device's peak rose in this phase.
        note: amount of work, in words.
    """

    name: str
    seconds: float
    planned: Seconds | None = None
    planned_bytes: int | None = None
    compiled_bytes: int | None = None
    peak_bytes: int | None = None
    is_peak: bool = False
    note: str = ""


@dataclass(frozen=True)
class Failure:
    """The phase that failed, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Result:
    """Result of a rehearsal.

    Attributes:
        rows: phases that succeeded, in order.
        failure: None: all phases succeeded.
        first: sizes at the start.
        sizes: sizes at the end; smaller if memory ran out.
        limit_bytes: memory limit of a device; None: the platform reports none.
    """

    rows: tuple[Row, ...]
    failure: Failure | None
    first: Sizes
    sizes: Sizes
    limit_bytes: int | None


@dataclass(frozen=True)
class PhaseOutcome:
    """Outcome of a phase: a note, its planned time, and the programs that it ran."""

    note: str = ""
    planned: Callable[[Expectations], Seconds] | None = None
    programs: tuple[str, ...] = ()


@dataclass
class Rows:
    """Collects a row per phase.

    Attributes:
        processes: whose memory is read after each phase.
        target: of the plan; None: there is no plan.
        rows: of the phases so far.
        limit: usable bytes of a device; None: the platform reports none.
    """

    processes: Sequence[ReportsMemory]
    target: Target | None
    rows: list[Row] = field(default_factory=list)
    limit: int | None = None
    _peak: int = 0
    _known: Expectations | None = None

    async def add(self, config: Config, name: str, seconds: float, outcome: PhaseOutcome) -> None:
        """Adds the row of a phase.

        Args:
            config: with the current sizes.
            name: of the phase.
            seconds: measured time.
            outcome: of the phase.
        """
        uses = [await process.memory() for process in self.processes]
        sizes = [
            use.programs[one] for use in uses for one in outcome.programs if one in use.programs
        ]
        peaks = [use.peak for use in uses if use.peak is not None]
        self.limit = min((use.limit for use in uses if use.limit is not None), default=None)
        expected, peak = self._expected(config), max(peaks, default=0)
        planned, planned_bytes = None, None
        if expected is not None:
            planned = None if outcome.planned is None else outcome.planned(expected)
            planned_bytes = expected.bytes_of(outcome.programs)
        self.rows.append(
            Row(
                name,
                seconds,
                planned=planned,
                planned_bytes=planned_bytes,
                compiled_bytes=max(sizes, default=None),
                peak_bytes=peak if peaks else None,
                is_peak=peak > self._peak,
                note=outcome.note,
            )
        )
        self._peak = max(peak, self._peak)

    def _expected(self, config: Config) -> Expectations | None:
        if self.target is None:
            return None
        if self._known is None or self._known.config != config:
            self._known = Expectations.of(config, self.target)
        return self._known


def report(name: str, result: Result) -> Figures:
    """Returns all figures of a rehearsal: seconds, and GiB of the fullest device.

    Args:
        name: of the run.
        result: of the rehearsal.
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
    """Yields the report as text: the table, the meaning of its marks, and the outcome."""
    phases = figures["phases"]
    measured = any(phase["device_peak_gib"] is not None for phase in phases)
    yield f"rehearsal of {figures['name']}"
    yield (
        "~ estimated by the plan, with its range; compiled: the figure of this machine's compiler "
        "plus the arrays on the device; all seconds measured once"
    )
    if measured:
        limit = figures["device_limit_gib"]
        of = "" if limit is None else f" of {limit:.2f} GiB"
        yield f"on the device: peak so far{of}; < where an earlier phase set the peak"
    else:
        yield "on the device: this platform reports no memory in use"
    largest = max(
        (phase["compiled_gib"] or phase["planned_gib"] or 0 for phase in phases), default=0
    )
    unit, factor = ("GiB", 1) if largest >= 1 else ("MiB", 1024)
    head = [*_SECONDS_HEAD, f"{unit} planned", "compiled", "on the device", ""]
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
        yield f"memory ran out: continued with {_sizes(sizes)} instead of {_sizes(first)}"
    failed = figures["failed"]
    if failed is None:
        yield f"everything fits and works with {_sizes(sizes)}"
    else:
        yield f"FAILED: {failed['phase']}: {failed['why']}"


def _sizes(sizes: Figures) -> str:
    return (
        f"plan.slots = {sizes['slots']} and plan.micro_batch_tokens = {sizes['micro_batch_tokens']}"
    )
