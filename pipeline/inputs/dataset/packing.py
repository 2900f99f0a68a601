"""Packs sequences into rows of one length, and says which worked examples a step learns from.

A row holds several sequences behind one another, told apart by `segments`, with positions that
begin anew with each: none is ever cut, none sees anything of its neighbours. Micro-batches are rows
of one length in at most two numbers, so that there are two shapes to compile, whatever the lengths.

What a step gets of the examples is a pure function of seed and step, so a resume needs no cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np

from pipeline.contracts.batches import (
    BatchShape,
    Packed,
    PackedBatch,
    Piece,
    Place,
)
from pipeline.contracts.rollouts import Demonstration
from pipeline.inputs.dataset.order import shuffled_order

OPEN_ROWS = 32
"""Rows of examples that are filled at the same time; more would fill them a little better."""


def first_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Indices of sequences, row by row: each goes into the first row that has room for it.

    With `lengths` descending it is first-fit decreasing, which takes at most 11/9 of the fewest
    rows, and 6/9 of a row more (Dosa 2007).

    Raises:
        ValueError: if a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    free = np.full(len(lengths), capacity)
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"a sequence has {length} tokens; a row has {capacity}")
        row = int(np.argmax(free >= length))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        free[row] -= length
    return rows


def lay_out(
    packed: Sequence[Sequence[Piece]], *, rows: int, shape: BatchShape
) -> tuple[PackedBatch, list[Place]]:
    """One micro-batch of `rows`, those that are left over empty, and where each piece is.

    No token has a weight yet.
    """

    def empty(value: int = 0) -> np.ndarray:
        return np.full((rows, shape.length), value, np.int32)

    batch = PackedBatch(
        tokens=empty(shape.pad),
        targets=empty(shape.pad),
        weights=np.zeros((rows, shape.length), np.float32),
        segments=empty(),
        positions=empty(),
    )
    places = []
    for row, pieces in enumerate(packed):
        start = 0
        for number, piece in enumerate(pieces, start=1):
            whole = np.concatenate([piece.prompt_tokens, piece.completion_tokens])
            end = start + len(whole)
            drawn = slice(start + len(piece.prompt_tokens) - 1, end - 1)
            batch.tokens[row, start:end] = whole
            batch.targets[row, start : end - 1] = whole[1:]
            batch.segments[row, start:end] = number
            batch.positions[row, start:end] = np.arange(len(whole))
            places.append(Place(row, drawn))
            start = end
    return batch, places


def sequences_for_step(
    examples: Sequence[Demonstration], *, seed: int, step: int, sequences: int, length: int
) -> list[Packed]:
    """The packed rows of `step`, counted from 0; epochs follow each other without a gap.

    Every epoch holds each example once, in an order of its own.

    Raises:
        ValueError: if an example is longer than `length`.
    """
    whole = (packed for epoch in count() for packed in _epoch(examples, seed, epoch, length))
    return list(islice(whole, step * sequences, (step + 1) * sequences))


def _epoch(
    examples: Sequence[Demonstration], seed: int, epoch: int, length: int
) -> Iterator[Packed]:
    """First fit in the epoch's order; the oldest row is closed when too many are open."""
    filling: list[list[Demonstration]] = []
    free: list[int] = []
    for index in shuffled_order(len(examples), seed=seed, epoch=epoch):
        example = examples[index]
        if len(example) > length:
            raise ValueError(f"example {example.id} has {len(example)} tokens; {length} fit")
        at = next((n for n, left in enumerate(free) if left >= len(example)), None)
        if at is None:
            if len(filling) == OPEN_ROWS:
                free.pop(0)
                yield tuple(filling.pop(0))
            at = len(filling)
            filling.append([])
            free.append(length)
        filling[at].append(example)
        free[at] -= len(example)
    yield from map(tuple, filling)


def packed_batches(sequences: Sequence[Packed], *, shape: BatchShape) -> list[PackedBatch]:
    """A step's packed examples as micro-batches; the weights sum to 1 over the step."""
    learned = sum(len(example.completion_tokens) for packed in sequences for example in packed)
    rows = iter(sequences)
    batches = []
    for size in shape.split(len(sequences)):
        batch, places = lay_out(list(islice(rows, size)), rows=size, shape=shape)
        for place in places:
            batch.weights[place.row, place.drawn] = 1.0 / learned
        batches.append(batch)
    return batches
