"""Buffers of a compiled program that promise 7 forbids: logits of many positions at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pipeline.compute.aot.hlo import Module, Shape


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
    """The results of all instructions, except those inside fusions.

    Instructions inside a fusion are computed element by element and have no buffer.
    """
    lines = [line for one in module.computations.values() for line in one.instructions.values()]
    fused = {name for line in lines if line.opcode == "fusion" for name in line.called}
    for name, computation in module.computations.items():
        for line in () if name in fused else computation.instructions.values():
            yield from (Buffer(line.name, shape) for shape in line.shapes)


def whole_logits(
    module: Module, *, vocab: int, model: Collection[int], most: int = 2048
) -> list[Buffer]:
    """Buffers with more than vocab x `most` elements; promise 7 allows none.

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
