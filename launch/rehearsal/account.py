"""The account of a rehearsal: what each phase took and held, beside what is planned for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from configs.schema import Config
from launch.rehearsal.expected import Expectations, Target
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.sizes import Sizes
from pipeline.plan.cost_model.roofline import Seconds


class Process(Protocol):
    """A process that can tell what it holds."""

    async def memory(self) -> MemoryUse:
        """Of its fullest device, now."""


@dataclass(frozen=True)
class Row:
    """A phase that went well.

    Attributes:
        name: of the phase.
        seconds: that it took.
        planned: that it was planned to take; None: nothing is planned of it.
        planned_bytes: of a chip at its fullest moment, likewise.
        compiled_bytes: by the compiler's account and what was on the device; None: no program.
        peak_bytes: that a device had in use up to its end, by its own account; None: it keeps none.
        is_peak: whether more was in use in this phase than before.
        note: what was done.
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
    """The phase at which the rehearsal ended, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Result:
    """What a rehearsal has found.

    Attributes:
        rows: phases that went well, in order.
        failure: None: all of them did.
        first: sizes that it began with.
        sizes: sizes in force at its end; smaller ones, if memory ran out.
        limit_bytes: of a device, by its own account; None: it keeps none.
    """

    rows: tuple[Row, ...]
    failure: Failure | None
    first: Sizes
    sizes: Sizes
    limit_bytes: int | None


@dataclass(frozen=True)
class Did:
    """What a phase did: in words, what was planned for it, and the programs that it ran."""

    note: str = ""
    planned: Callable[[Expectations], Seconds] | None = None
    programs: tuple[str, ...] = ()


@dataclass
class Account:
    """Rows, as phases end.

    Attributes:
        processes: that are asked what they hold.
        target: what the plan is made for; None: nothing is planned.
        rows: of the phases that are over.
        limit: bytes of a device that may be used, by its own account; None: it keeps none.
    """

    processes: Sequence[Process]
    target: Target | None
    rows: list[Row] = field(default_factory=list)
    limit: int | None = None
    _peak: int = 0
    _known: Expectations | None = None

    async def write(self, config: Config, name: str, seconds: float, did: Did) -> None:
        """Adds a row.

        Args:
            config: with the sizes that are in force now.
            name: of the phase.
            seconds: that it took.
            did: what it did.
        """
        uses = [await process.memory() for process in self.processes]
        sizes = [use.programs[one] for use in uses for one in did.programs if one in use.programs]
        peaks = [use.peak for use in uses if use.peak is not None]
        self.limit = min((use.limit for use in uses if use.limit is not None), default=None)
        expected, peak = self._expected(config), max(peaks, default=0)
        planned, planned_bytes = None, None
        if expected is not None:
            planned = None if did.planned is None else did.planned(expected)
            planned_bytes = expected.bytes_of(did.programs)
        self.rows.append(
            Row(
                name,
                seconds,
                planned=planned,
                planned_bytes=planned_bytes,
                compiled_bytes=max(sizes, default=None),
                peak_bytes=peak if peaks else None,
                is_peak=peak > self._peak,
                note=did.note,
            )
        )
        self._peak = max(peak, self._peak)

    def _expected(self, config: Config) -> Expectations | None:
        if self.target is None:
            return None
        if self._known is None or self._known.config != config:
            self._known = Expectations.of(config, self.target)
        return self._known
