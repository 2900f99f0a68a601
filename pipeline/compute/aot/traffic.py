"""Bytes that the instructions of a compiled program read and write in main memory (HBM). No JAX.

An instruction reads its operands and writes its results, with the padding of their layouts, unless
they are in VMEM. A slice or a gather reads its result, also inside a fusion; an update in place
writes the new part. An asynchronous copy counts where it starts.
"""

from __future__ import annotations

import re

from pipeline.compute.aot.hlo import Computation, Instruction, Module, Shape

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
"""Opcodes that exchange data with other chips."""

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier"),
    *("after-all", "partition-id", "replica-id"),
}
_FREE_CALLS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast"}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PARTIAL = {"slice", "dynamic-slice", "gather"}
_SAME_VALUES = {"bitcast", "reshape"}
_NEW_PART = {"dynamic-update-slice": 1, "scatter": 2}
"""Operand that holds what is written in place."""
_CHANGING = {"convolution", "dot", "reduce", "custom-call", "fusion", *_NEW_PART}


def is_free(line: Instruction) -> bool:
    """Whether an instruction computes and moves nothing."""
    if line.opcode == "custom-call":
        target = _TARGET.search(line.text)
        return target is not None and target[1] in _FREE_CALLS
    return line.opcode in _FREE


def moved_bytes(module: Module, where: Computation, line: Instruction) -> int:
    """Bytes of main memory that one run of an instruction reads and writes.

    Args:
        module: the program.
        where: the computation that the instruction is in.
        line: the instruction.
    """
    if line.opcode.endswith("-done"):
        return 0
    if line.opcode in {"copy-start", "slice-start"}:
        # The results: both places, of which a slice's source may be larger, and a context.
        places = [shape for shape in line.shapes if shape.dims][:2]
        moved = min((shape.bytes for shape in places), default=0)  # a scalar has no dims
        return sum(moved for shape in places if shape.in_hbm)
    read = sum(
        read_bytes(module, line, number, shape)
        for number, operand in enumerate(line.operands)
        for shape in where.instructions[operand].shapes
        if shape.in_hbm
    )
    return read + _written(module, where, line, only_hbm=True)


def read_bytes(module: Module, line: Instruction, number: int, shape: Shape) -> int:
    """Bytes that an instruction reads of its operand `number`, which has this shape."""
    if number == 0 and line.opcode in _PARTIAL | {"slice-start"}:
        part = line.shapes[line.opcode == "slice-start"]  # its first result is the whole
        return min(shape.bytes, part.bytes // part.itemsize * shape.itemsize)
    if number == 0 and line.opcode in _NEW_PART:
        return 0
    if line.opcode == "fusion":
        fused = module.computations[line.called[0]]
        return min(shape.bytes, _read_inside(module, fused, number, shape))
    return shape.bytes


def _read_inside(module: Module, fused: Computation, number: int, shape: Shape) -> int:
    """Bytes that a fusion reads of its parameter `number`: arrays inside are not in memory."""
    same, total = set[str](), 0
    for line in fused.instructions.values():
        if line.opcode == "parameter" and line.text.startswith(f"({number})"):
            same.add(line.name)
        for place, operand in enumerate(line.operands):
            if operand not in same:
                continue
            if line.opcode not in _CHANGING and line.shapes[0].elements == shape.elements:
                same.add(line.name)
            else:
                total += read_bytes(module, line, place, shape)
    return total + (shape.bytes if fused.root.name in same else 0)


def _written(module: Module, where: Computation, line: Instruction, *, only_hbm: bool) -> int:
    """Bytes that an instruction writes."""
    counted = [shape.in_hbm or not only_hbm for shape in line.shapes]
    if line.opcode in _NEW_PART:
        new = where.instructions[line.operands[_NEW_PART[line.opcode]]].shapes[0]
        return new.bytes if counted[0] else 0
    if line.opcode != "fusion":
        return sum(shape.bytes for shape, here in zip(line.shapes, counted, strict=True) if here)
    fused = module.computations[line.called[0]]
    root, total = fused.root, 0
    results = root.operands if root.opcode == "tuple" else [root.name] * len(line.shapes)
    for shape, here, name in zip(line.shapes, counted, results, strict=True):
        result = fused.instructions[name]
        while result.opcode in _SAME_VALUES:
            result = fused.instructions[result.operands[0]]
        inside = result.opcode in {"fusion", *_NEW_PART}
        if here and inside:
            total += min(shape.bytes, _written(module, fused, result, only_hbm=False))
        elif here:
            total += shape.bytes
    return total
