"""Bytes of a large parameter that a compiled program reads, loops included."""

from __future__ import annotations

from pipeline.compute.aot.hlo import CALLING, Module
from pipeline.compute.aot.traffic import read_bytes

_SAME_MEMORY = {"bitcast", "reshape", "optimization-barrier", "copy-done", "async-done", "tuple"}


def bytes_read(module: Module, elements: int) -> int:
    """Returns the bytes read of arrays with this number of elements: the parameter and its copies.

    A slice or a gather reads its result; later uses of the result do not count. A copy of the whole
    parameter reads it, and its readers count, too.

    Args:
        module: the program.
        elements: number of elements of the parameter, which no other array of the program has.

    Raises:
        ValueError: if the trip count of a loop is unknown.
    """
    return _computation(module, module.entry, elements)


def _computation(module: Module, name: str, elements: int) -> int:
    """Bytes that a computation reads, those that it calls included."""
    where, total = module.computations[name], 0
    for line in where.instructions.values():
        if line.opcode == "while":
            if once := _computation(module, line.attribute("body"), elements):
                total += round(once * module.trips(line, where))
        elif line.opcode in CALLING - {"fusion"}:
            total += sum(_computation(module, called, elements) for called in line.called)
        elif line.opcode not in _SAME_MEMORY:
            for number, operand in enumerate(line.operands):
                shapes = where.instructions[operand].shapes
                if len(shapes) == 1 and shapes[0].elements == elements:
                    total += read_bytes(module, line, number, shapes[0])
    return total
