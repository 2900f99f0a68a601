"""Bytes that a compiled program moves from and to a chip's main memory (HBM). No JAX.

An instruction reads its operands and writes its results, with the padding of their layouts, unless
they are in VMEM. A slice or a gather reads its result, also inside a fusion; an update in place
writes the new part. An asynchronous copy moves what it copies.
"""

from __future__ import annotations

import re

from pipeline.compute.aot.hlo import Computation, Instruction, Module, Shape

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "optimization-barrier",
    "while",
    "call",
    "conditional",
}
"""Opcodes that move nothing by themselves."""
_STARTS = {"copy-start", "slice-start", "async-start"}
_PARTIAL = {"slice", "dynamic-slice", "gather"}
_SAME = {"bitcast", "reshape"}


def hbm_bytes(module: Module, where: Computation, line: Instruction) -> int:
    """Bytes that one run of an instruction moves."""
    if line.opcode in FREE or _target(line) in _NOTHING:
        return 0
    if line.opcode in _STARTS:
        arrays = [shape for shape in line.shapes if shape.dims]
        moved = min(arrays, key=_bytes)
        return sum(_bytes(moved) for shape in arrays if shape.in_hbm)
    read = sum(
        _read(module, where, line, number, shape)
        for number, operand in enumerate(line.operands)
        for shape in where.instructions[operand].shapes
        if shape.in_hbm
    )
    return read + _written(module, where, line)


def _bytes(shape: Shape) -> int:
    return shape.itemsize * (shape.padded or shape.elements)


_NOTHING = {"AllocateBuffer", "AssumeGatherIndicesInBound"}


def _target(line: Instruction) -> str | None:
    found = re.search(r'custom_call_target="(\w+)"', line.text)
    return found[1] if found and line.opcode == "custom-call" else None


def _read(
    module: Module, where: Computation, line: Instruction, number: int, shape: Shape
) -> int:
    """Bytes that an instruction reads of operand `number`."""
    if line.opcode in _PARTIAL and number == 0:
        return min(shape.hbm_bytes, _bytes(line.shapes[0]))
    if line.opcode == "dynamic-update-slice" and number == 0:
        return 0
    if line.opcode == "fusion":
        return min(shape.hbm_bytes, _of_parameter(module, line.called[0], number, shape))
    return shape.hbm_bytes


def _of_parameter(module: Module, name: str, number: int, shape: Shape) -> int:
    """Bytes that a fusion reads of its parameter `number`."""
    fused, total = module.computations[name], 0
    same = {
        line.name
        for line in fused.instructions.values()
        if line.opcode == "parameter" and line.text.startswith(f"({number})")
    }
    for line in fused.instructions.values():
        for place, operand in enumerate(line.operands):
            if operand not in same:
                continue
            if line.opcode in _SAME:
                same.add(line.name)
            else:
                total += _read(module, fused, line, place, shape)
    return total + (shape.hbm_bytes if fused.root.name in same else 0)


def _written(module: Module, where: Computation, line: Instruction) -> int:
    """Bytes that an instruction writes."""
    if not any(shape.in_hbm for shape in line.shapes):
        return 0
    if line.opcode == "dynamic-update-slice":
        return sum(map(_bytes, where.instructions[line.operands[1]].shapes))
    if line.opcode != "fusion":
        return sum(shape.hbm_bytes for shape in line.shapes)
    fused = module.computations[line.called[0]]
    root = fused.root
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for shape, result in zip(line.shapes, results, strict=False):
        while result.opcode in _SAME:
            result = fused.instructions[result.operands[0]]
        if result.opcode in {"dynamic-update-slice", "fusion"}:
            total += min(shape.hbm_bytes, _written(module, fused, result)) if shape.in_hbm else 0
        else:
            total += shape.hbm_bytes
    return total
