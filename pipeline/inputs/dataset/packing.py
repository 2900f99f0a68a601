"""Packs sequences into rows of fixed length, and selects the demonstrations of an SFT step.

A row contains several sequences, separated by `segments`; positions restart with each sequence.
Sequences are never truncated and do not attend to each other. Micro-batches have at most two
different numbers of rows, so at most two shapes are compiled.

The demonstrations of a step are a pure function of seed and step, so a resume needs no cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np

from pipeline.contracts.batches import (
    BatchShape,
    CompletionSlice,
    PackableSequence,
    PackedBatch,
    PackedRow,
)
from pipeline.contracts.rollouts import Demonstration
from pipeline.inputs.dataset.order import shuffled_order

OPEN_ROWS = 32
"""Number of rows that are filled at the same time; more rows would be filled slightly better."""


def first_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """First-fit bin packing: indices of sequences by row; each goes into the first row with space.

    With descending `lengths` this is first-fit decreasing, which needs at most 11/9 of the minimum
    number of rows plus 6/9 (Dosa 2007).

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
    packed: Sequence[Sequence[PackableSequence]], *, rows: int, shape: BatchShape
) -> tuple[PackedBatch, list[CompletionSlice]]:
    """One micro-batch of `rows` rows, unused ones empty, and the location of each completion.

    All token weights are 0.
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
    slices = []
    for row, sequences in enumerate(packed):
        start = 0
        for number, sequence in enumerate(sequences, start=1):
            whole = np.concatenate([sequence.prompt_tokens, sequence.completion_tokens])
            end = start + len(whole)
            predicting = slice(start + len(sequence.prompt_tokens) - 1, end - 1)
            batch.tokens[row, start:end] = whole
            batch.targets[row, start : end - 1] = whole[1:]
            batch.segments[row, start:end] = number
            batch.positions[row, start:end] = np.arange(len(whole))
            slices.append(CompletionSlice(row, predicting))
            start = end
    return batch, slices


def sequences_for_step(
    demonstrations: Sequence[Demonstration], *, seed: int, step: int, sequences: int, length: int
) -> list[PackedRow]:
    """The packed rows of `step`, counted from 0; epochs follow each other without a gap.

    Every epoch contains each demonstration once, in a different order.

    Raises:
        ValueError: if a demonstration is longer than `length`.
    """
    rows = (row for epoch in count() for row in _epoch(demonstrations, seed, epoch, length))
    return list(islice(rows, step * sequences, (step + 1) * sequences))


def _epoch(
    demonstrations: Sequence[Demonstration], seed: int, epoch: int, length: int
) -> Iterator[PackedRow]:
    """First fit in the epoch's order; yields the oldest row if `OPEN_ROWS` are open."""
    open_rows: list[list[Demonstration]] = []
    free: list[int] = []
    for index in shuffled_order(len(demonstrations), seed=seed, epoch=epoch):
        one = demonstrations[index]
        if len(one) > length:
            raise ValueError(f"demonstration {one.id} has {len(one)} tokens; a row has {length}")
        at = next((n for n, space in enumerate(free) if space >= len(one)), None)
        if at is None:
            if len(open_rows) == OPEN_ROWS:
                free.pop(0)
                yield tuple(open_rows.pop(0))
            at = len(open_rows)
            open_rows.append([])
            free.append(length)
        open_rows[at].append(one)
        free[at] -= len(one)
    yield from map(tuple, open_rows)


def packed_batches(sequences: Sequence[PackedRow], *, shape: BatchShape) -> list[PackedBatch]:
    """Micro-batches of a step's packed demonstrations; the weights sum to 1 over the step."""
    learned = sum(len(one.completion_tokens) for row in sequences for one in row)
    rows = iter(sequences)
    batches = []
    for size in shape.split(len(sequences)):
        batch, slices = lay_out(list(islice(rows, size)), rows=size, shape=shape)
        for at in slices:
            batch.weights[at.row, at.positions] = 1.0 / learned
        batches.append(batch)
    return batches
