"""Seconds of a compiled TPU program, from its HLO and final schedule. No JAX.

No figure is a measurement. An instruction takes, whichever is longer, the compiler's estimate in
cycles, a cost model, or its bundles in the final schedule, which do not include stalls. Those
without an estimate (sorts, gathers, updates in place, Pallas kernels and other custom calls,
collectives) are modelled: by their schedule, by their traffic at `KERNEL_SHARE` of the memory
bandwidth, or by the bytes that they move between chips. Asynchronous copies overlap with
computation and share the bandwidth in the order of the program; computation waits for them. A
program takes at least as long as all of its memory traffic.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.compute.aot.hlo import Computation, Instruction, Module
from pipeline.compute.aot.traffic import COLLECTIVES, is_free, moved_bytes

CLOCK_HZ = 1.5e9
"""Clock of a TPU v5e; estimates and schedules are in its cycles."""
BYTES_PER_S = 819e9
"""Peak bandwidth of its main memory."""
LINK_BYTES_PER_S = 200e9
"""Peak bandwidth of all its links to other chips."""
KERNEL_SHARE = 0.85
"""Share of the bandwidth that an instruction without an estimate gets."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Work:
    """All runs of an instruction.

    Attributes:
        line: the instruction.
        runs: number of runs, by the trip counts of the enclosing loops.
        seconds: of one run.
        hbm_bytes: bytes of main memory that a run reads and writes.
    """

    line: Instruction
    runs: float
    seconds: float
    hbm_bytes: int


def works_of(
    module: Module, schedule: Mapping[str, int], *, trips: float | None = None
) -> list[Work]:
    """The instructions of a program that take time.

    A called computation counts at each call, a conditional as its cheapest branch, because the
    others run rarely.

    Args:
        module: the program.
        schedule: bundles of its instructions; see `schedule.read_schedules`.
        trips: trip count of loops whose own depends on the program's arguments.

    Raises:
        ValueError: if there is such a loop, and no trip count for it.
    """
    return list(_Program(module, schedule, trips).works(module.entry, 1))


def program_seconds(works: Sequence[Work]) -> float:
    """Seconds of a program: of its instructions, or of their memory traffic, if that is longer."""
    return max(_busy_s(works), sum(work.runs * work.hbm_bytes for work in works) / BYTES_PER_S)


def _busy_s(works: Iterable[Work]) -> float:
    return sum(work.runs * work.seconds for work in works)


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
                clock += _busy_s(inner) / runs
                yield from inner
                continue
            if is_free(line):
                continue
            seconds, moved = 0.0, moved_bytes(self.module, where, line)
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
                    seconds = self._seconds(line, moved)
            clock += seconds
            yield Work(line, runs, seconds, moved)

    def _inner(self, where: Computation, line: Instruction, runs: float) -> list[Work]:
        """The works of the computations that an instruction runs."""
        if line.opcode == "while":
            trips = self.module.trips(line, where, unknown=self.trips)
            return list(self.works(line.attribute("body"), runs * trips)) if trips else []
        branches = [list(self.works(called, runs)) for called in line.called]
        if line.opcode == "conditional":
            return min(branches, key=_busy_s)
        return [work for works in branches for work in works]

    def _seconds(self, line: Instruction, moved: int) -> float:
        """Seconds of a run that does not overlap."""
        own = _CYCLES.search(line.text)
        scheduled = self.schedule.get(line.name, 0) / CLOCK_HZ
        if own:
            return max(int(own[1]) / CLOCK_HZ, scheduled)
        if line.opcode in COLLECTIVES:
            return _exchanged_bytes(line) / LINK_BYTES_PER_S
        return max(scheduled, moved / (KERNEL_SHARE * BYTES_PER_S))


def _exchanged_bytes(line: Instruction) -> int:
    """Bytes of the results of a collective, which the links carry."""
    return sum(shape.bytes for shape in line.shapes)
