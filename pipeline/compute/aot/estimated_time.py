"""Seconds of a compiled TPU program by part of the model, from its HLO and final schedule. No JAX.

No figure is a measurement. An instruction takes, whichever is longer, the compiler's estimate in
cycles, a cost model, or its bundles in the final schedule, which do not include stalls. Those
without an estimate (sorts, gathers, updates in place, Pallas kernels and other custom calls,
collectives) are modelled: by their schedule, by their traffic at `KERNEL_SHARE` of the memory
bandwidth, or by the bytes that they move between chips. Asynchronous copies overlap with
computation and share the bandwidth in the order of the program; what waits for one is a part of
its own. A program takes at least as long as all of its memory traffic.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.compute.aot.hlo import Computation, Instruction, Module
from pipeline.compute.aot.parts import part_of
from pipeline.compute.aot.traffic import COLLECTIVES, is_free, moved_bytes

CLOCK_HZ = 1.5e9
"""Clock of a TPU v5e; estimates and schedules are in its cycles."""
BYTES_PER_S = 819e9
"""Peak bandwidth of its main memory."""
LINK_BYTES_PER_S = 200e9
"""Peak bandwidth of all its links to other chips."""
KERNEL_SHARE = 0.85
"""Share of the bandwidth that an instruction without an estimate gets."""
UNSCHEDULED_SHARE = 0.1
"""Share of the bandwidth at which such an instruction reads and writes, in any memory, without a
schedule. By schedules it is 0.09 for a sort, 0.17 for a Pallas kernel, 0.2 to 0.5 for gathers."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Work:
    """All runs of an instruction.

    Attributes:
        part: see `parts.part_of`.
        runs: number of runs, by the trip counts of the enclosing loops.
        seconds: of one run.
        hbm_bytes: bytes of main memory that a run reads and writes.
        is_modelled: whether the compiler has no estimate.
    """

    part: str
    runs: float
    seconds: float
    hbm_bytes: int
    is_modelled: bool


@dataclass(frozen=True)
class PartTime:
    """Seconds of a part of a program.

    Attributes:
        seconds: of all its instructions.
        modelled_s: of those without the compiler's estimate.
        traffic_s: of its memory traffic at the peak bandwidth.
    """

    seconds: float
    modelled_s: float
    traffic_s: float

    @classmethod
    def of(cls, works: Iterable[Work]) -> PartTime:
        """The sums of some works."""
        found = list(works)
        return cls(
            sum(work.runs * work.seconds for work in found),
            sum(work.runs * work.seconds for work in found if work.is_modelled),
            sum(work.runs * work.hbm_bytes for work in found) / BYTES_PER_S,
        )


def part_times(
    module: Module, schedule: Mapping[str, int], *, trips: float | None = None
) -> dict[str, PartTime]:
    """Times of the parts of a program, the longest first.

    A called computation counts at each call, a conditional as its cheapest branch, because the
    others run rarely.

    Args:
        module: the program.
        schedule: bundles of its instructions, see `schedule.read_schedules`; empty: unknown.
        trips: trip count of loops whose own depends on the program's arguments.

    Raises:
        ValueError: if there is such a loop, and no trip count for it.
    """
    parts = defaultdict[str, list[Work]](list)
    for work in _Program(module, schedule, trips).works(module.entry, 1):
        parts[work.part].append(work)
    found = {part: PartTime.of(works) for part, works in parts.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def program_seconds(parts: Mapping[str, PartTime]) -> float:
    """Seconds of a program: of its parts, or of their memory traffic, whichever is longer."""
    return max(
        sum(part.seconds for part in parts.values()),
        sum(part.traffic_s for part in parts.values()),
    )


@dataclass(frozen=True)
class _Program:
    module: Module
    schedule: Mapping[str, int]
    trips: float | None

    def works(self, name: str, runs: float) -> Iterator[Work]:
        """The instructions of a computation in the order of the program."""
        where, clock = self.module.computations[name], 0.0
        free_at = defaultdict[float, float](float)  # when memory and links have done their work
        ends: dict[str, float] = {}
        for line in where.instructions.values():
            if line.opcode in {"while", "conditional", "call"}:
                inner = self._inner(where, line, runs)
                clock += PartTime.of(inner).seconds / runs
                yield from inner
                continue
            if is_free(line):
                continue
            seconds, moved, is_modelled = 0.0, moved_bytes(self.module, where, line), False
            rate, size = BYTES_PER_S, moved
            if line.opcode.removesuffix("-start") in COLLECTIVES:
                rate, size = LINK_BYTES_PER_S, _exchanged_bytes(line)
            if line.opcode.endswith("-done"):
                seconds = max(0.0, ends.get(line.operands[0], 0.0) - clock)
            else:
                free_at[rate] = max(free_at[rate], clock) + size / rate
                if line.opcode.endswith("-start"):
                    ends[line.name] = free_at[rate]
                else:
                    seconds, is_modelled = self._seconds(where, line, moved)
            clock += seconds
            yield Work(part_of(self.module, where, line), runs, seconds, moved, is_modelled)

    def _inner(self, where: Computation, line: Instruction, runs: float) -> list[Work]:
        """The works of the computations that an instruction runs."""
        if line.opcode == "while":
            trips = self.module.trips(line, where, unknown=self.trips)
            return list(self.works(line.attribute("body"), runs * trips)) if trips else []
        branches = [list(self.works(called, runs)) for called in line.called]
        if line.opcode == "conditional":
            return min(branches, key=lambda works: PartTime.of(works).seconds)
        return [work for works in branches for work in works]

    def _seconds(self, where: Computation, line: Instruction, moved: int) -> tuple[float, bool]:
        """Seconds of a run that does not overlap, and whether they are modelled."""
        own = _CYCLES.search(line.text)
        scheduled = self.schedule.get(line.name, 0) / CLOCK_HZ
        if own:
            return max(int(own[1]) / CLOCK_HZ, scheduled), False
        if line.opcode in COLLECTIVES:
            return _exchanged_bytes(line) / LINK_BYTES_PER_S, True
        if not self.schedule:
            everything = moved_bytes(self.module, where, line, only_hbm=False)
            return everything / (UNSCHEDULED_SHARE * BYTES_PER_S), True
        return max(scheduled, moved / (KERNEL_SHARE * BYTES_PER_S)), True


def _exchanged_bytes(line: Instruction) -> int:
    """Bytes of the results of a collective, which the links carry."""
    return sum(shape.bytes for shape in line.shapes)
