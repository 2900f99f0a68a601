"""Packed micro-batches: shapes and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from pipeline.contracts.rollouts import Demonstration, RolloutName

Packed = tuple[Demonstration, ...]
"""Examples that share a row."""


@dataclass(frozen=True)
class BatchShape:
    """The sizes of micro-batches.

    Attributes:
        rows: rows of a full one.
        tail_rows: rows of a small one, which takes what is left of a step where that is little.
        length: positions of a row.
        pad: token that fills.
    """

    rows: int
    tail_rows: int
    length: int
    pad: int

    def split(self, rows: int) -> list[int]:
        """Sizes of the micro-batches that hold so many rows, full ones first.

        The rest goes into small ones when it is at most half of a full one.
        """
        full, rest = divmod(rows, self.rows)
        if 2 * rest > self.rows:
            full, rest = full + 1, 0
        return [self.rows] * full + [self.tail_rows] * -(-rest // self.tail_rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the micro-batches that there can be, the largest first."""
        return (self.rows, self.tail_rows) if 2 * self.tail_rows <= self.rows else (self.rows,)


@runtime_checkable
class Piece(Protocol):
    """What is packed: a prompt and the completion that is learned."""

    @property
    def prompt_tokens(self) -> np.ndarray:
        """int32 `prompt`."""

    @property
    def completion_tokens(self) -> np.ndarray:
        """int32 `seq`."""


@dataclass(frozen=True)
class Place:
    """Where a piece is: its row, and which positions predict its completion."""

    row: int
    drawn: slice


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch, aligned to the position that predicts: column t is about token t + 1.

    Attributes:
        tokens: inputs, padded behind.
        targets: the next token of each input.
        weights: of each target in the loss; 0 for prompts and padding.
        segments: which piece of its row a token belongs to, from 1; 0 is padding.
        positions: of each token in its piece.
    """

    tokens: Int32[np.ndarray, "rows seq"]
    targets: Int32[np.ndarray, "rows seq"]
    weights: Float32[np.ndarray, "rows seq"]
    segments: Int32[np.ndarray, "rows seq"]
    positions: Int32[np.ndarray, "rows seq"]

    @property
    def num_tokens(self) -> int:
        """Learned tokens."""
        return int(np.count_nonzero(self.weights))

    @property
    def num_padded(self) -> int:
        """Positions that hold nothing."""
        return int(np.count_nonzero(self.segments == 0))


def padding_metrics(batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Positions that are computed and hold nothing, and their share of all."""
    padded = sum(batch.num_padded for batch in batches)
    positions = sum(batch.tokens.size for batch in batches)
    return {"tokens_padded": float(padded), "padded_share": padded / max(positions, 1)}


@dataclass(frozen=True)
class TokenBatch(PackedBatch):
    """One micro-batch of rollouts; see `PackedBatch`.

    Attributes:
        advantages: of the rollout that each target belongs to; 0 where nothing is learned.
        sampled_logprobs: the sampler's for each target, under the full distribution; likewise.
        processed_logprobs: under the distribution that it drew from; likewise.
        versions: policy version that drew each target; likewise.
        places: where each rollout's completion is predicted, by name.
    """

    advantages: Float32[np.ndarray, "rows seq"]
    sampled_logprobs: Float32[np.ndarray, "rows seq"]
    processed_logprobs: Float32[np.ndarray, "rows seq"]
    versions: Int32[np.ndarray, "rows seq"]
    places: dict[RolloutName, Place]
