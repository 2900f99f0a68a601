"""Packs worked examples into sequences of one length, and says which ones a step learns from.

What a step gets is a pure function of seed and step, so a resume needs no cursor. An example is
never cut, and sees nothing of its neighbours (`segments`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
from jaxtyping import Float32, Int32

from pipeline.data.order import shuffled_order
from pipeline.datatypes import Example

Packed = tuple[Example, ...]
"""Examples that share a sequence."""

OPEN_SEQUENCES = 32
"""Sequences that are filled at the same time; more would fill them a little better."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch, aligned to the position that predicts: column t is about token t + 1.

    Attributes:
        tokens: inputs, padded behind.
        targets: the next token of each input.
        weights: of each target in the loss; 0 for prompts and padding. They sum to 1 over the step.
        segments: which example of its row a token belongs to, from 1; 0 is padding.
        positions: of each token in its example.
    """

    tokens: Int32[np.ndarray, "batch seq"]
    targets: Int32[np.ndarray, "batch seq"]
    weights: Float32[np.ndarray, "batch seq"]
    segments: Int32[np.ndarray, "batch seq"]
    positions: Int32[np.ndarray, "batch seq"]

    @property
    def num_tokens(self) -> int:
        """Learned tokens."""
        return int(np.count_nonzero(self.weights))


def sequences_for_step(
    examples: Sequence[Example], *, seed: int, step: int, sequences: int, length: int
) -> list[Packed]:
    """The packed sequences of `step`, counted from 0; epochs follow each other without a gap.

    Every epoch holds each example once, in an order of its own.

    Raises:
        ValueError: if an example is longer than `length`.
    """
    whole = (packed for epoch in count() for packed in _epoch(examples, seed, epoch, length))
    return list(islice(whole, step * sequences, (step + 1) * sequences))


def _epoch(examples: Sequence[Example], seed: int, epoch: int, length: int) -> Iterator[Packed]:
    """First fit in the epoch's order; the oldest sequence is closed when too many are open."""
    filling: list[list[Example]] = []
    free: list[int] = []
    for index in shuffled_order(len(examples), seed=seed, epoch=epoch):
        example = examples[index]
        if len(example) > length:
            raise ValueError(f"example {example.id} has {len(example)} tokens; {length} fit")
        at = next((n for n, left in enumerate(free) if left >= len(example)), None)
        if at is None:
            if len(filling) == OPEN_SEQUENCES:
                free.pop(0)
                yield tuple(filling.pop(0))
            at = len(filling)
            filling.append([])
            free.append(length)
        filling[at].append(example)
        free[at] -= len(example)
    yield from map(tuple, filling)


def packed_batches(
    sequences: Sequence[Packed], *, rows: int, length: int, pad: int
) -> list[PackedBatch]:
    """A step's sequences as micro-batches of `rows`; the last one is filled with empty rows."""
    learned = sum(len(example.completion_tokens) for packed in sequences for example in packed)
    return [
        _pack(sequences[start : start + rows], rows, length, pad, 1.0 / learned)
        for start in range(0, len(sequences), rows)
    ]


def _pack(
    sequences: Sequence[Packed], rows: int, length: int, pad: int, weight: float
) -> PackedBatch:
    def empty(value: int = 0) -> np.ndarray:
        return np.full((rows, length), value, np.int32)

    batch = PackedBatch(
        tokens=empty(pad),
        targets=empty(pad),
        weights=np.zeros((rows, length), np.float32),
        segments=empty(),
        positions=empty(),
    )
    for row, packed in enumerate(sequences):
        start = 0
        for number, example in enumerate(packed, start=1):
            whole = np.concatenate([example.prompt_tokens, example.completion_tokens])
            end = start + len(whole)
            batch.tokens[row, start:end] = whole
            batch.targets[row, start : end - 1] = whole[1:]
            batch.weights[row, start + len(example.prompt_tokens) - 1 : end - 1] = weight
            batch.segments[row, start:end] = number
            batch.positions[row, start:end] = np.arange(len(whole))
            start = end
    return batch
