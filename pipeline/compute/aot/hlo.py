"""Parses the optimised HLO text of a compiled program: computations and trip counts of loops.

No JAX. Supports the text that the XLA versions in use print for scheduled programs; a loop with an
unknown trip count is an error, never a guess.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TypeAlias

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# Result, name, shape (in brackets if it is a tuple), opcode, and the rest with the operands first.
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)(\(.*)$")
_OPERANDS = re.compile(r"\(.*?\)(?=$|, \w+=)")
# Element type, dimensions, and a layout: axes from the minor one, tiles, memory space.
_SHAPE = re.compile(
    r"([a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\](?:\{([0-9,]*)(?::([^}]*))?\})?"
)
_TILE = re.compile(r"T\(([0-9,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OVER_LINES = re.compile(r"kernel_metadata=\{\n[^\n]*\n\}")
"""An attribute of Pallas kernels that spans lines."""


@dataclass(frozen=True)
class Shape:
    """An array.

    Attributes:
        dtype: element type.
        dims: dimensions.
        in_hbm: whether it is in main memory; false: in a chip's VMEM or another fast memory.
        padded: elements with the padding of tiles; None: there is none.
    """

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool = field(default=True, compare=False)
    padded: int | None = field(default=None, compare=False)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.dims)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, at least 1."""
        bits = re.search(r"\d+", self.dtype)
        return max(1, int(bits[0]) // 8) if bits else 1

    @property
    def bytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.itemsize * (self.padded or self.elements)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: unique in its computation.
        opcode: name of the operation.
        shapes: shapes of the result; several for a tuple.
        operands: names of the operands, in order.
        text: the rest of the line after the opcode, operands included.
        is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls once; for a conditional all branches, for a loop none."""
        branches = _BRANCHES.search(self.text)
        if branches:
            return tuple(name.strip().lstrip("%") for name in branches[1].split(","))
        return tuple(_CALLED.findall(self.text))

    def attribute(self, name: str) -> str:
        """The computation or number after `name=`."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        assert found, (name, self.text)
        return found[1]


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(i for i in self.instructions.values() if i.is_root)


@dataclass(frozen=True)
class Module:
    """A program."""

    computations: Mapping[str, Computation]
    entry: str

    def trips(
        self, loop: Instruction, inside: Computation, *, unknown: float | None = None
    ) -> float:
        """Trip count of a while loop in computation `inside`.

        The scalars that the loop starts with are carried through its body until its condition is
        false; XLA notes no trip counts in programs for TPUs.

        Args:
            loop: the instruction.
            inside: its computation.
            unknown: the trip count if the program does not determine it.

        Raises:
            ValueError: if it is unknown and not given.
        """
        condition = self.computations[loop.attribute("condition")]
        body = self.computations[loop.attribute("body")]
        carried = self._value(inside, loop.operands[0], None)
        for count in range(_MOST_TRIPS):
            goes_on = self._value(condition, condition.root.name, (carried,))
            if goes_on is None:
                break
            if not goes_on:
                return count
            before, carried = carried, self._value(body, body.root.name, (carried,))
            if carried == before:
                break
        if unknown is not None:
            return unknown
        raise ValueError(f"loop {loop.name}: the program does not determine its trip count")

    def _value(self, where: Computation, name: str, given: tuple[_Value, ...] | None) -> _Value:
        """The value of an integer, or of a tuple of them; None: it depends on other values.

        Args:
            where: the computation.
            name: the instruction.
            given: the computation's parameters; None: they are unknown.
        """
        line = where.instructions[name]
        if line.opcode in {"constant", "parameter"}:
            number = re.match(r"\((-?\d+)\)", line.text)
            if number is None or line.opcode == "constant":
                return None if number is None else int(number[1])
            return None if given is None else given[int(number[1])]
        is_scalar = len(line.shapes) == 1 and not line.shapes[0].dims
        if line.opcode not in (_OF_SCALARS if is_scalar else _OF_TUPLES):
            return None
        values = tuple(self._value(where, operand, given) for operand in line.operands)
        if line.opcode == "fusion":
            called = self.computations[line.called[0]]
            return self._value(called, called.root.name, values)
        return _result(line, values)


_Value: TypeAlias = "int | tuple[_Value, ...] | None"

_MOST_TRIPS = 100_000
_OF_TUPLES = {"tuple", "get-tuple-element"}
_OF_SCALARS = _OF_TUPLES | {"fusion", "compare", "add", "copy", "bitcast", "convert"}
_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def _result(line: Instruction, values: tuple[_Value, ...]) -> _Value:
    if line.opcode == "tuple":
        return values
    first = values[0]
    if line.opcode == "get-tuple-element":
        return first[int(line.attribute("index"))] if isinstance(first, tuple) else None
    if line.opcode in {"add", "compare"}:
        second = values[1]
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        of = operator.add if line.opcode == "add" else _COMPARISONS[line.attribute("direction")]
        return of(first, second)
    return first


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
        ValueError: if the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry: str | None = None
    lines: dict[str, Instruction] | None = None
    for raw in _OVER_LINES.sub("", text).splitlines():
        header = _HEADER.match(raw)
        if header:
            lines = {}
            computations[header[2]] = Computation(lines)
            entry = header[2] if header[1] else entry
        elif raw.startswith("}"):
            lines = None
        elif lines is not None:
            line = _instruction(raw)
            lines[line.name] = line
    if entry is None:
        raise ValueError("not an HLO program: the text has no ENTRY computation")
    return Module(computations, entry)


def _instruction(raw: str) -> Instruction:
    found = _INSTRUCTION.match(raw)
    assert found, raw
    operands = _OPERANDS.match(found[5])
    assert operands, raw
    shapes = (_shape(*parts) for parts in _SHAPE.findall(found[3]))
    return Instruction(
        name=found[2],
        opcode=found[4],
        shapes=tuple(shapes),
        operands=tuple(_OPERAND.findall(operands[0])),
        text=found[5],
        is_root=bool(found[1]),
    )


def _shape(dtype: str, dims: str, order: str, layout: str) -> Shape:
    sizes = tuple(int(size) for size in dims.split(",") if size)
    tile, space = _TILE.search(layout), _SPACE.search(layout)
    in_hbm = space is None or space[1] == "0"
    if tile is None or not sizes:
        return Shape(dtype, sizes, in_hbm)
    # The tile's last size is that of the minor axis.
    physical = [sizes[int(axis)] for axis in order.split(",")]
    tiles = [int(size) for size in reversed(tile[1].split(","))]
    tiles += [1] * (len(physical) - len(tiles))
    padded = prod(-(-size // of) * of for size, of in zip(physical, tiles, strict=False))
    return Shape(dtype, sizes, in_hbm, padded if padded != prod(sizes) else None)
