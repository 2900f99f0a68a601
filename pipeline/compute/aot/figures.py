"""What a compiled TPU program costs, read from its HLO: seconds and large buffers.

The seconds are the compiler's cost model, not a measurement: it is blind inside custom calls and
says nothing of collectives and of copies that run beside the computation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pipeline.compute.aot.hlo import CALLING, Module, Shape

TPU_CLOCK_HZ = 1.5e9
"""Of a TPU v5e, in whose cycles the compiler estimates."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_seconds(module: Module) -> float:
    """The compiler's estimate: cycles of each instruction x trips of the loops around it.

    What is called counts where it is called; of a conditional the cheapest branch, because the
    others are for what rarely happens. An instruction with an estimate stands for what it calls.

    Raises:
        ValueError: if a loop's trips cannot be told.
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
        name: the instruction that makes it.
        shape: type and dimensions.
    """

    name: str
    shape: Shape


def buffers(module: Module) -> Iterator[Buffer]:
    """What the program's instructions leave in memory.

    Inside a fusion nothing is: what stands there is computed element by element.
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
    """Buffers that hold the vocabulary x more than `most` others: invariant 3 wants none.

    These are arrays with more than vocab x `most` elements, in whatever shape: logits that are
    flattened, or split into blocks of the vocabulary and stacked, are as large as whole ones. Left
    out are arrays with one of the `model`'s own dimensions, which scores of a vocabulary do not
    have: hidden states, activations of the MLP, and the embedding itself.

    Args:
        module: the program.
        vocab: entries of the vocabulary, of a sharded one those of a device.
        model: sizes that tell the model's own arrays: its width and its MLP's.
        most: how many others are allowed.
    """
    return [
        buffer
        for buffer in buffers(module)
        if buffer.shape.elements > vocab * most
        and not _is_the_models_own(buffer.shape, vocab=vocab, model=model)
    ]


def _is_the_models_own(shape: Shape, *, vocab: int, model: Collection[int]) -> bool:
    if vocab in shape.dims:
        others = [size for size in shape.dims if size not in {1, vocab}]
        return len(others) == 1 and others[0] in model
    return any(size in model for size in shape.dims)
