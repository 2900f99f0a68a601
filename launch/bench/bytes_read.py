"""Bytes of a large parameter that a compiled program reads, loops included."""

from __future__ import annotations

import re

from pipeline.compute.aot.hlo import CALLING, Computation, Instruction, Module

_SAME_MEMORY = {"bitcast", "reshape", "optimization-barrier", "copy-done", "async-done", "tuple"}
_PARTIAL = {"slice", "dynamic-slice", "gather"}
_REDUCING = {"convolution", "dot", "reduce", "custom-call"}


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
                total += once * module.trips(line, where)
        elif line.opcode in CALLING - {"fusion"}:
            total += sum(_computation(module, called, elements) for called in line.called)
        elif line.opcode not in _SAME_MEMORY:
            for number, operand in enumerate(line.operands):
                shapes = where.instructions[operand].shapes
                if len(shapes) == 1 and shapes[0].elements == elements:
                    total += shapes[0].itemsize * _elements(module, line, number, elements)
    return total


def _elements(module: Module, line: Instruction, number: int, elements: int) -> int:
    """Elements that an instruction reads of its whole operand `number`."""
    if line.opcode in _PARTIAL:
        return line.shapes[0].elements
    if line.opcode == "slice-start":  # ((whole), part, context)
        return line.shapes[1].elements
    if line.opcode == "fusion":
        return _fused(module, module.computations[line.called[0]], number, elements)
    return elements


def _fused(module: Module, fused: Computation, number: int, elements: int) -> int:
    """Elements of parameter `number` that a fusion reads: arrays inside are not in memory."""
    whole, total = set[str](), 0
    for line in fused.instructions.values():
        if line.opcode == "parameter" and re.match(rf"\({number}\)", line.text):
            whole.add(line.name)
        for place, operand in enumerate(line.operands):
            if operand not in whole:
                continue
            if line.shapes[0].elements == elements and line.opcode not in _REDUCING | {"fusion"}:
                whole.add(line.name)
            else:
                total += _elements(module, line, place, elements)
    return total + (elements if fused.root.name in whole else 0)
