"""Cost figures of a compiled TPU program: memory, seconds and large buffers. Text in, no JAX.

Memory is read from the report that XLA writes beside a dump. It counts arguments, results and
temporaries with their layouts, gaps included, which the compiler compares with the available
memory. `memory_analysis()` counts the temporaries of loops twice with libtpu 0.0.42.

Seconds are the compiler's cost model, not a measurement: it has no figures for the inside of custom
calls, for collectives, or for copies that overlap with computation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pipeline.compute.aot.hlo import CALLING, Module, Shape

HBM = "default"
"""Memory space of the accelerator's main memory."""

TPU_CLOCK_HZ = 1.5e9
"""Clock of a TPU v5e; the compiler's estimates are in its cycles."""

_SPACE = re.compile(r"^Memory Space: (\S+).*\nTotal bytes: (\d+)", re.MULTILINE)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def memory_spaces(report: str) -> dict[str, int]:
    """Bytes by memory space.

    Raises:
        ValueError: if the text is not a memory report.
    """
    found = {name: int(size) for name, size in _SPACE.findall(report)}
    if HBM not in found:
        raise ValueError(f"no memory space {HBM!r} in this report: {report[:200]!r}")
    return found


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


@dataclass(frozen=True)
class Buffer:
    """An array that a program holds in memory.

    Attributes:
        name: the instruction that produces it.
        shape: element type and dimensions.
    """

    name: str
    shape: Shape


def buffers(module: Module) -> Iterator[Buffer]:
    """The results of the program's instructions, except those inside fusions.

    Instructions inside a fusion are computed element by element and have no buffer.
    """
    yield from _buffers(module, module.entry, set())


def _buffers(module: Module, name: str, seen: set[str]) -> Iterator[Buffer]:
    if name in seen:
        return
    seen.add(name)
    for line in module.computations[name].instructions.values():
        yield from (Buffer(line.name, shape) for shape in line.shapes)
        called = line.called if line.opcode in CALLING - {"fusion"} else ()
        if line.opcode == "while":
            called = (line.attribute("body"), line.attribute("condition"))
        for inner in called:
            yield from _buffers(module, inner, seen)


def whole_logits(
    module: Module, *, vocab: int, model: Collection[int], most: int = 2048
) -> list[Buffer]:
    """Buffers with more than vocab x `most` elements; invariant 3 allows none.

    Any shape counts: logits that are flattened, or split into blocks of the vocabulary and stacked,
    are as large as whole ones. Arrays with one of the `model` dimensions, which logits do not have,
    are excluded: hidden states, activations of the MLP, and the embedding itself.

    Args:
        module: the program.
        vocab: entries of the vocabulary, per device if it is sharded.
        model: dimensions of the model's own arrays: its width and its MLP's.
        most: allowed number of elements per entry of the vocabulary.
    """
    return [
        buffer
        for buffer in buffers(module)
        if buffer.shape.elements > vocab * most
        and not _is_model_array(buffer.shape, vocab=vocab, model=model)
    ]


def _is_model_array(shape: Shape, *, vocab: int, model: Collection[int]) -> bool:
    if vocab in shape.dims:
        others = [size for size in shape.dims if size not in {1, vocab}]
        return len(others) == 1 and others[0] in model
    return any(size in model for size in shape.dims)
