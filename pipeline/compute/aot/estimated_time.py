"""Seconds of a compiled TPU program, by part, from its optimised HLO and final schedule. No JAX.

The compiler's HLO has an estimate of most instructions in cycles, a cost model. It has none of
sorts, gathers, scatters, updates in place, Pallas kernels and other custom calls: their time is
that of their schedule or of the memory traffic at `SHARE` of the bandwidth, whichever is longer.
Asynchronous copies overlap with computation. A program takes the time of its instructions, or that
of its whole memory traffic, whichever is longer. No figure is a measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.compute.aot.hlo import Computation, Instruction, Module
from pipeline.compute.aot.traffic import FREE, hbm_bytes

TPU_CLOCK_HZ = 1.5e9
"""Clock of a TPU v5e; estimates and schedules are in its cycles."""
TPU_BYTES_PER_S = 819e9
"""Peak bandwidth of its main memory."""
SHARE = 0.85
"""Share of the bandwidth that kernels, sorts and gathers get."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_START, _DONE = {"copy-start", "slice-start", "async-start"}, {"copy-done", "slice-done", "async-done"}


@dataclass(frozen=True)
class Work:
    """All runs of an instruction that takes time.

    Attributes:
        line: the instruction.
        runs: number of runs, by the trip counts of the enclosing loops.
        seconds: of one run.
        hbm_bytes: of one run.
        modelled: whether the compiler has no estimate, and `seconds` are those of the schedule.
    """

    line: Instruction
    runs: int
    seconds: float
    hbm_bytes: int
    modelled: bool


def works(module: Module, schedule: Mapping[str, int]) -> Iterator[Work]:
    """The instructions of a program, once each for every call of their computation.

    A conditional counts as its cheapest branch, because the others run rarely.

    Args:
        module: the program.
        schedule: bundles of one run, by instruction; see `schedule.read_schedules`.

    Raises:
        ValueError: if the trip count of a loop is unknown.
    """
    return _works(module, module.entry, 1, schedule)


def _works(module: Module, name: str, runs: int, schedule: Mapping[str, int]) -> Iterator[Work]:
    """As `works`, of one computation: a clock, and the time at which all copies so far end."""
    where, clock, copied, ends = module.computations[name], 0.0, 0.0, dict[str, float]()
    for line in where.instructions.values():
        if line.opcode in {"while", "conditional", "call"}:
            inner = list(_inner(module, where, line, runs, schedule))
            clock += total_s(inner) / runs
            yield from inner
        elif line.opcode in _DONE:
            late = ends.get(line.operands[0], 0.0) - clock
            if late > 0:
                clock += late
                yield Work(line, runs, late, 0, modelled=False)
        elif line.opcode not in FREE:
            own, size = _CYCLES.search(line.text), hbm_bytes(module, where, line)
            copied = max(copied, clock) + size / TPU_BYTES_PER_S
            seconds, modelled = int(own[1]) / TPU_CLOCK_HZ if own else 0.0, False
            if line.opcode in _START:
                ends[line.name] = copied
            elif own is None:
                modelled, cycles = True, schedule.get(line.name, 0)
                seconds = max(cycles / TPU_CLOCK_HZ, size / (SHARE * TPU_BYTES_PER_S))
            clock += seconds
            yield Work(line, runs, seconds, size, modelled)


def _inner(
    module: Module, where: Computation, line: Instruction, runs: int, schedule: Mapping[str, int]
) -> Iterator[Work]:
    """The works of the computations that an instruction runs."""
    if line.opcode == "while":
        trips = module.trips(line, where)
        yield from _works(module, line.attribute("body"), runs * trips, schedule)
    else:
        branches = [list(_works(module, called, runs, schedule)) for called in line.called]
        if line.opcode == "conditional":
            branches = [min(branches, key=total_s)]
        for branch in branches:
            yield from branch


def total_s(works: list[Work]) -> float:
    """Seconds of instructions that run one after another, without waiting for copies."""
    return sum(work.runs * work.seconds for work in works)


def traffic_s(works: list[Work]) -> float:
    """Least seconds of their memory traffic."""
    return sum(work.runs * work.hbm_bytes for work in works) / TPU_BYTES_PER_S


def estimated_seconds(module: Module, schedule: Mapping[str, int]) -> float:
    """Seconds of a program: of its instructions or of its memory traffic.

    Raises:
        ValueError: if the trip count of a loop is unknown.
    """
    found = list(works(module, schedule))
    return max(total_s(found), traffic_s(found))
