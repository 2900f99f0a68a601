"""Estimated seconds of a compiled TPU program, from its optimised HLO. No JAX.

Seconds are the compiler's cost model, not a measurement: it has no figures for the inside of custom
calls, for collectives, or for copies that overlap with computation.
"""

from __future__ import annotations

import re

from pipeline.compute.aot.hlo import CALLING, Module

TPU_CLOCK_HZ = 1.5e9
"""Clock of a TPU v5e; the compiler's estimates are in its cycles."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_seconds(module: Module) -> float:
    """The compiler's estimate: cycles of each instruction x trip counts of the enclosing loops.

    A called computation counts at each call. A conditional counts as its cheapest branch, because
    the others run rarely. An instruction's own estimate includes the computations that it calls.

    Raises:
        ValueError: if the trip count of a loop is unknown.
    """
    return _cycles(module, module.entry) / TPU_CLOCK_HZ


def _cycles(module: Module, name: str) -> int:
    where = module.computations[name]
    total = 0
    for line in where.instructions.values():
        own = _CYCLES.search(line.text)
        if own:
            total += int(own[1])
        elif line.opcode == "while":
            total += module.trips(line, where) * _cycles(module, line.attribute("body"))
        elif line.opcode in CALLING:
            costs = [_cycles(module, called) for called in line.called]
            total += min(costs) if line.opcode == "conditional" else sum(costs)
    return total
