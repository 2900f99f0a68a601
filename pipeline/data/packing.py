"""Packs sequences into rows of fixed length, and selects the demonstrations of an SFT step.

A row contains several sequences, separated by `segments`; positions restart with each sequence.
Completions of one prompt may share it: a row then has the prompt once, and positions restart after
it. Sequences are never truncated and do not attend to each other. Micro-batches have at most two
different numbers of rows, so at most two shapes are compiled.

The demonstrations of a step are a pure function of seed and step, so a resume needs no cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import TypeVar

import numpy as np

from pipeline.data.order import shuffled_order
from pipeline.data.packed_batch import (
    BatchShape,
    CompletionSlice,
    PackableSequence,
    PackedBatch,
    PackedRow,
)
from pipeline.types import Demonstration

Packed = TypeVar("Packed", bound=PackableSequence)

OPEN_ROWS = 32
"""Number of rows that are filled at the same time; more rows would be filled slightly better."""


def first_fit(groups: Sequence[Sequence[Packed]], *, capacity: int) -> list[list[list[Packed]]]:
    """First-fit bin packing of sequences: the groups of each row, whole or in parts.

    The sequences of a group share their prompt, which takes space once for each row that has some
    of them. Each sequence goes into the first row with space that has its prompt, else into the
    first one with space for both.

    With one sequence in each group and descending lengths this is first-fit decreasing, which needs
    at most 11/9 of the minimum number of rows plus 6/9 (Dosa 2007).

    Raises:
        ValueError: if a sequence is longer than a row.
    """
    rows: list[list[list[Packed]]] = []
    free = np.full(sum(map(len, groups)), capacity)
    for group in groups:
        prefix = len(group[0].prompt_tokens) - 1
        parts: dict[int, list[Packed]] = {}
        for sequence in group:
            own = len(sequence.completion_tokens)
            row = next((row for row in parts if free[row] >= own), None)
            if row is None:
                if prefix + own > capacity:
                    raise ValueError(
                        f"a sequence has {prefix + own} positions; a row has {capacity}"
                    )
                row = int(np.argmax(free >= prefix + own))
                if row == len(rows):
                    rows.append([])
                rows[row].append(parts.setdefault(row, []))
                free[row] -= prefix
            parts[row].append(sequence)
            free[row] -= own
    return rows


def lay_out(
    packed: Sequence[Sequence[Sequence[PackableSequence]]],
    *,
    rows: int,
    shape: BatchShape,
    share_prefix: bool,
) -> tuple[PackedBatch, list[CompletionSlice]]:
    """One micro-batch of `rows` rows, unused ones empty, and the location of each completion.

    All token weights are 0. `packed` has the sequences by row and group; those of a group have the
    same prompt, and several only with `share_prefix`.
    """

    def empty(value: int = 0) -> np.ndarray:
        return np.full((rows, shape.length), value, np.int32)

    batch = PackedBatch(
        tokens=empty(shape.pad),
        targets=empty(shape.pad),
        weights=np.zeros((rows, shape.length), np.float32),
        segments=empty(),
        positions=empty(),
        prefixes=empty() if share_prefix else None,
    )
    slices = []
    for row, groups in enumerate(packed):
        end = segment = 0

        def append(
            tokens: np.ndarray, *, first: int, segment: int, prefix: int, row: int = row
        ) -> slice:
            nonlocal end
            at = slice(end, end + len(tokens))
            batch.tokens[row, at] = tokens
            batch.positions[row, at] = first + np.arange(len(tokens))
            batch.segments[row, at] = segment
            if batch.prefixes is not None:
                batch.prefixes[row, at] = prefix
            end = at.stop
            return at

        for group in groups:
            prompt = group[0].prompt_tokens
            segment = prefix = segment + 1
            append(prompt[:-1], first=0, segment=segment, prefix=prefix)
            for sequence in group:
                segment += len(group) > 1
                targets = sequence.completion_tokens
                inputs = np.concatenate([prompt[-1:], targets[:-1]])
                at = append(inputs, first=len(prompt) - 1, segment=segment, prefix=prefix)
                batch.targets[row, at] = targets
                slices.append(CompletionSlice(row, at))
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
        alone = [[[one] for one in row] for row in islice(rows, size)]
        batch, slices = lay_out(alone, rows=size, shape=shape, share_prefix=False)
        for at in slices:
            batch.weights[at.row, at.positions] = 1.0 / learned
        batches.append(batch)
    return batches
