"""Packed micro-batches: shapes and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from pipeline.types import Demonstration, RolloutName

PackedRow = tuple[Demonstration, ...]
"""Demonstrations that are packed into one row."""


@dataclass(frozen=True)
class BatchShape:
    """Sizes of micro-batches.

    Attributes:
        rows: rows of a full micro-batch.
        tail_rows: rows of a small micro-batch, for the last rows of a step.
        length: tokens of a row.
        pad: id of the padding token.
        share_prefix: whether rollouts of one prompt share it in a row.
    """

    rows: int
    tail_rows: int
    length: int
    pad: int
    share_prefix: bool = False

    def split(self, rows: int) -> list[int]:
        """Sizes of the micro-batches for this many rows, full ones first.

        The remainder goes into small micro-batches if it is at most half of a full one.
        """
        full, rest = divmod(rows, self.rows)
        if 2 * rest > self.rows:
            full, rest = full + 1, 0
        return [self.rows] * full + [self.tail_rows] * -(-rest // self.tail_rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Possible numbers of rows of a micro-batch, largest first."""
        return (self.rows, self.tail_rows) if 2 * self.tail_rows <= self.rows else (self.rows,)


@runtime_checkable
class PackableSequence(Protocol):
    """A prompt and the completion that is trained on."""

    @property
    def prompt_tokens(self) -> np.ndarray:
        """int32 `prompt`."""

    @property
    def completion_tokens(self) -> np.ndarray:
        """int32 `seq`."""


@dataclass(frozen=True)
class CompletionSlice:
    """Location of a completion in a batch: its row and the positions that predict its tokens."""

    row: int
    positions: slice


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch. A completion is aligned to the predicting positions.

    A completion of n tokens has n adjacent positions, whose inputs are the prompt's last token and
    the completion without its last one. The other tokens of the prompt stand before it, once for
    all completions of a group that shares its prompt.

    Attributes:
        tokens: input tokens, right-padded.
        targets: the next token at the positions of completions; the padding token elsewhere.
        weights: loss weight of each target; 0 for prompts and padding.
        segments: number of a token's sequence within its row, from 1; 0 is padding. A shared prompt
            has its own number, and so does each of its completions.
        positions: position of each token in its sequence, prompt included.
        prefixes: segment of the prompt that a token attends to besides its own segment, which may
            be the same; None if no prompts are shared.
    """

    tokens: Int32[np.ndarray, "rows seq"]
    targets: Int32[np.ndarray, "rows seq"]
    weights: Float32[np.ndarray, "rows seq"]
    segments: Int32[np.ndarray, "rows seq"]
    positions: Int32[np.ndarray, "rows seq"]
    prefixes: Int32[np.ndarray, "rows seq"] | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens with a loss weight."""
        return int(np.count_nonzero(self.weights))

    @property
    def num_padded(self) -> int:
        """Number of padding tokens."""
        return int(np.count_nonzero(self.segments == 0))


def padding_metrics(batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Number of positions, of padding tokens, and the share of these."""
    padded = sum(batch.num_padded for batch in batches)
    positions = sum(batch.tokens.size for batch in batches)
    return {
        "positions": float(positions),
        "tokens_padded": float(padded),
        "padded_share": padded / max(positions, 1),
    }


@dataclass(frozen=True)
class TokenBatch(PackedBatch):
    """One micro-batch of rollouts; see `PackedBatch`.

    All arrays below are 0 for prompts and padding.

    Attributes:
        advantages: advantage of each target's rollout.
        sampled_logprobs: the sampler's log-prob of each target under the full distribution.
        processed_logprobs: the sampler's log-prob of each target under the distribution that it
            sampled from, after top-k, top-p and min-p.
        versions: policy version that sampled each target.
        completions: location of each rollout's completion, by name.
    """

    advantages: Float32[np.ndarray, "rows seq"]
    sampled_logprobs: Float32[np.ndarray, "rows seq"]
    processed_logprobs: Float32[np.ndarray, "rows seq"]
    versions: Int32[np.ndarray, "rows seq"]
    completions: dict[RolloutName, CompletionSlice]
