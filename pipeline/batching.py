"""Packs rollouts into micro-batches of fixed shapes, and gives each token its weight in the loss.

The weights are normalised over the whole step before it is cut up, so gradients of micro-batches
simply add up to those of the unsplit batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

from pipeline.datatypes import Rollout, RolloutName


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch, aligned to the position that predicts: column t is about token t + 1.

    Attributes:
        tokens: inputs, left-aligned, padded behind.
        targets: the next token of each input.
        weights: of each target in the loss; 0 for prompt and padding. They sum to 1 over all
            tokens of the step that have a reward.
        advantages: of the rollout in each row.
        sampled_logprobs: what the sampler recorded for each target.
        names: of the rollouts, one for each row that is not empty.
    """

    tokens: Int32[np.ndarray, "batch seq"]
    targets: Int32[np.ndarray, "batch seq"]
    weights: Float32[np.ndarray, "batch seq"]
    advantages: Float32[np.ndarray, " batch"]
    sampled_logprobs: Float32[np.ndarray, "batch seq"]
    names: tuple[RolloutName, ...]

    @property
    def num_tokens(self) -> int:
        """Learned tokens."""
        return int(np.count_nonzero(self.weights))


def token_weights(rollouts: Sequence[Rollout], mode: Literal["sequence", "token"]) -> list[float]:
    """Weight of each token of each rollout; 0 for rollouts without a reward.

    "token" is the mean over all tokens of the step (DAPO, arXiv:2503.14476); "sequence" the mean
    over rollouts of the mean over their tokens (GRPO, arXiv:2402.03300).
    """
    lengths = [
        0 if rollout.reward is None else len(rollout.completion.tokens) for rollout in rollouts
    ]
    if mode == "token":
        total = sum(lengths)
        return [1.0 / total if length else 0.0 for length in lengths]
    count = sum(length > 0 for length in lengths)
    return [1.0 / (count * length) if length else 0.0 for length in lengths]


def micro_batches(
    rollouts: Sequence[Rollout],
    *,
    rows: int,
    buckets: Sequence[int],
    mode: Literal["sequence", "token"],
    pad: int,
    keep_zero_advantage: bool,
) -> list[TokenBatch]:
    """Cuts a step's rollouts into batches of `rows`, the longest first.

    Args:
        rollouts: a step's rollouts in any order; the result depends on their names only.
        rows: rows of each batch; the last one is filled with empty rows.
        buckets: allowed sequence lengths, ascending; each batch takes the smallest that holds it.
        mode: see `token_weights`.
        pad: token that fills.
        keep_zero_advantage: keep rollouts whose advantage is 0. They have no policy gradient, but
            a KL term still pulls on them.
    """
    named = sorted(rollouts, key=lambda rollout: rollout.completion.name)
    weighted = [
        (rollout, weight)
        for rollout, weight in zip(named, token_weights(named, mode), strict=True)
        if weight and (keep_zero_advantage or rollout.advantage)
    ]
    weighted.sort(key=lambda pair: -_length(pair[0]))
    return [
        _pack(weighted[start : start + rows], rows=rows, buckets=buckets, pad=pad)
        for start in range(0, len(weighted), rows)
    ]


def _length(rollout: Rollout) -> int:
    return len(rollout.completion.prompt_tokens) + len(rollout.completion.tokens)


def _pack(
    weighted: Sequence[tuple[Rollout, float]], *, rows: int, buckets: Sequence[int], pad: int
) -> TokenBatch:
    longest = max(_length(rollout) for rollout, _ in weighted)
    seq = min(bucket for bucket in buckets if bucket >= longest)
    batch = TokenBatch(
        tokens=np.full((rows, seq), pad, np.int32),
        targets=np.full((rows, seq), pad, np.int32),
        weights=np.zeros((rows, seq), np.float32),
        advantages=np.zeros(rows, np.float32),
        sampled_logprobs=np.zeros((rows, seq), np.float32),
        names=tuple(rollout.completion.name for rollout, _ in weighted),
    )
    for row, (rollout, weight) in enumerate(weighted):
        completion = rollout.completion
        whole = np.concatenate([completion.prompt_tokens, completion.tokens])
        first = len(completion.prompt_tokens) - 1
        drawn = slice(first, first + len(completion.tokens))
        batch.tokens[row, : len(whole)] = whole
        batch.targets[row, : len(whole) - 1] = whole[1:]
        batch.weights[row, drawn] = weight
        batch.sampled_logprobs[row, drawn] = completion.logprobs
        batch.advantages[row] = rollout.advantage
    return batch
