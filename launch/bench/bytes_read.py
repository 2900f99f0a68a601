"""Bytes of a parameter that a compiled program reads, loops included."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from pipeline.compute.aot.hlo import CALLING, Computation, Instruction, Module

_SAME_MEMORY = {"bitcast", "reshape", "optimization-barrier", "copy-done", "async-done"}
_PARTIAL = {"slice", "dynamic-slice", "gather"}
_REDUCING = {"convolution", "dot", "reduce", "custom-call"}


def bytes_read(module: Module, dims: tuple[int, ...]) -> int:
    """Bytes of an entry parameter that the program reads: those of each reader x its trip count.

    The parameter is followed through bitcasts, loops and calls, and into fusions. A slice or a
    gather reads its result; later uses of the result do not count. A copy of the whole parameter
    reads it, and is followed in its place.

    Args:
        module: the program.
        dims: dimensions of the parameter, which identify it.

    Raises:
        ValueError: if not exactly one entry parameter has these dimensions, or if the trip count of
            a loop is unknown.
    """
    entry = module.computations[module.entry]
    parameters = [i for i in entry.instructions.values() if i.opcode == "parameter"]
    parameters.sort(key=_number)
    marks = tuple(
        _Mark(line.shapes[0].itemsize, in_memory=True)
        if [shape.dims for shape in line.shapes] == [dims]
        else None
        for line in parameters
    )
    found = len(marks) - marks.count(None)
    if found != 1:
        raise ValueError(f"{found} entry parameters have the dimensions {dims}, wanted one")
    elements = max(line.shapes[0].elements for line in parameters if line.shapes[0].dims == dims)
    return _Reading(module, elements).run(module.entry, marks, fused=False)[0]


def _number(parameter: Instruction) -> int:
    found = re.match(r"\((\d+)\)", parameter.text)
    assert found, parameter.text
    return int(found[1])


@dataclass(frozen=True)
class _Mark:
    """Marks a value that holds the whole parameter, with its bytes per element in memory.

    `in_memory` is False for values inside a fusion, which are computed element by element.
    """

    itemsize: int
    in_memory: bool


_Marks: TypeAlias = "_Mark | tuple[_Marks, ...] | None"


def _any(marks: _Marks) -> bool:
    return any(map(_any, marks)) if isinstance(marks, tuple) else marks is not None


def _either(left: _Marks, right: _Marks) -> _Marks:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return tuple(_either(a, b) for a, b in zip(left, right, strict=True))
    return left if _any(left) else right


@dataclass(frozen=True)
class _Reading:
    """Follows a parameter with `elements`; `run` returns bytes read and marks of the result."""

    module: Module
    elements: int

    def run(self, name: str, given: tuple[_Marks, ...], *, fused: bool) -> tuple[int, _Marks]:
        where = self.module.computations[name]
        marks: dict[str, _Marks] = {}
        total = 0
        for line in where.instructions.values():
            if line.opcode == "parameter":
                marks[line.name] = given[_number(line)]
                continue
            read, marks[line.name] = self._line(
                line, where, tuple(marks[operand] for operand in line.operands), fused=fused
            )
            total += read
        return total, marks[where.root.name]

    def _line(
        self, line: Instruction, where: Computation, taken: tuple[_Marks, ...], *, fused: bool
    ) -> tuple[int, _Marks]:
        if not _any(taken):
            return 0, None
        first = taken[0]
        if line.opcode == "tuple":
            return 0, taken
        if line.opcode == "get-tuple-element":
            return 0, first[int(line.attribute("index"))] if isinstance(first, tuple) else None
        if line.opcode in _SAME_MEMORY:
            return 0, first[0] if isinstance(first, tuple) else first
        if line.opcode == "while":
            return self._loop(line, where, first)
        if line.opcode in CALLING:
            return self._call(line, taken, fused=fused)
        return self._operation(line, taken, fused=fused)

    def _loop(self, line: Instruction, where: Computation, start: _Marks) -> tuple[int, _Marks]:
        carried, body = start, line.attribute("body")
        while True:
            read, after = self.run(body, (carried,), fused=False)
            both = _either(carried, after)
            if both == carried:
                return read * self.module.trips(line, where), carried
            carried = both

    def _call(
        self, line: Instruction, taken: tuple[_Marks, ...], *, fused: bool
    ) -> tuple[int, _Marks]:
        into_fusion = line.opcode == "fusion"
        given = taken[1:] if line.opcode == "conditional" else taken
        total, result = 0, None
        for number, called in enumerate(line.called):
            inputs = (given[number],) if line.opcode == "conditional" else given
            read, marks = self.run(called, inputs, fused=into_fusion)
            total, result = total + read, _either(result, marks)
        if into_fusion and not fused and isinstance(result, _Mark) and not result.in_memory:
            total += self.elements * result.itemsize
            result = _Mark(line.shapes[0].itemsize, in_memory=True)
        return total, result

    def _operation(
        self, line: Instruction, taken: tuple[_Marks, ...], *, fused: bool
    ) -> tuple[int, _Marks]:
        marks = [mark for mark in taken if isinstance(mark, _Mark)]
        if line.opcode == "slice-start":  # ((whole), part, context)
            return line.shapes[1].elements * marks[0].itemsize, None
        if line.opcode in _PARTIAL:
            return line.shapes[0].elements * marks[0].itemsize, None
        whole = sum(self.elements * mark.itemsize for mark in marks)
        if line.opcode == "copy-start":  # (copy, whole, context)
            return whole, (_Mark(line.shapes[0].itemsize, in_memory=True), marks[0], None)
        if line.shapes[0].elements != self.elements or line.opcode in _REDUCING:
            return whole, None
        if fused:
            return 0, _Mark(marks[0].itemsize, in_memory=False)
        return whole, _Mark(line.shapes[0].itemsize, in_memory=True)
