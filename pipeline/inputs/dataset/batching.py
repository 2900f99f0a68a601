"""Packs rollouts into micro-batches of fixed shapes, and gives each token its weight in the loss.

The weights are normalised over the whole step before it is cut up, so gradients of micro-batches
simply add up to those of the unsplit, unpacked batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from configs.learner import TokenWeights
from configs.schema import Config
from pipeline.contracts.batches import BatchShape, TokenBatch
from pipeline.contracts.rollouts import Completion, Rollout
from pipeline.inputs.dataset.packing import first_fit, lay_out


def batch_shape(config: Config, *, pad: int) -> BatchShape:
    """The sizes of the learner's micro-batches; a small one has a row for each device."""
    return BatchShape(
        rows=config.micro_batch_rows,
        tail_rows=config.plan.learner_shards,
        length=config.row_tokens,
        pad=pad,
    )


def token_weights(
    rollouts: Sequence[Rollout], mode: TokenWeights, *, budget: int, mask_overlong: bool = False
) -> list[float]:
    """Weight of each token of each rollout; 0 for rollouts that take no part.

    Over the N rollouts that take part, of lengths L:

        sequence   1 / (N L)         mean over rollouts of means (GRPO, arXiv:2402.03300)
        token      1 / (sum of L)    mean over all tokens (DAPO, arXiv:2503.14476)
        constant   1 / (N budget)    no length divides (Dr. GRPO, arXiv:2503.20783)

    Args:
        rollouts: of a step; those without a reward take no part.
        mode: which of the three.
        budget: tokens that a completion may have.
        mask_overlong: rollouts that were cut by length take no part either.
    """
    lengths = [
        0
        if rollout.reward is None or (mask_overlong and rollout.completion.stop_reason == "length")
        else len(rollout.completion.tokens)
        for rollout in rollouts
    ]
    total, count = sum(lengths), sum(length > 0 for length in lengths)
    if mode == "token":
        return [1.0 / total if length else 0.0 for length in lengths]
    if mode == "constant":
        return [1.0 / (count * budget) if length else 0.0 for length in lengths]
    return [1.0 / (count * length) if length else 0.0 for length in lengths]


@dataclass(frozen=True)
class _Weighted:
    """A rollout as what is packed, and the weight of its tokens."""

    rollout: Rollout
    weight: float

    @property
    def prompt_tokens(self) -> np.ndarray:
        return self.rollout.completion.prompt_tokens

    @property
    def completion_tokens(self) -> np.ndarray:
        return self.rollout.completion.tokens

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.completion_tokens)


def micro_batches(
    rollouts: Sequence[Rollout],
    *,
    shape: BatchShape,
    weights: Sequence[float],
    keep_zero_advantage: bool,
) -> list[TokenBatch]:
    """Packs a step's rollouts, the longest first, into full micro-batches and then small ones.

    Args:
        rollouts: a step's rollouts in any order; the result depends on their names only.
        shape: sizes of the batches.
        weights: of the tokens of each rollout; those of weight 0 are left out.
        keep_zero_advantage: keep rollouts whose advantage is 0. They have no policy gradient, but
            a KL term still pulls on them.

    Raises:
        ValueError: if a rollout is longer than a row.
    """
    kept = [
        _Weighted(rollout, weight)
        for rollout, weight in zip(rollouts, weights, strict=True)
        if weight and (keep_zero_advantage or rollout.advantage)
    ]
    kept.sort(key=lambda piece: (-len(piece), piece.rollout.completion.name))
    packed = first_fit([len(piece) for piece in kept], capacity=shape.length)
    rows = iter([[kept[index] for index in row] for row in packed])
    return [_fill(list(islice(rows, size)), size, shape) for size in shape.split(len(packed))]


def _fill(packed: Sequence[Sequence[_Weighted]], rows: int, shape: BatchShape) -> TokenBatch:
    batch, places = lay_out(packed, rows=rows, shape=shape)
    advantages, sampled, kept = (np.zeros_like(batch.weights) for _ in range(3))
    versions = np.zeros_like(batch.tokens)
    pieces = [piece for row in packed for piece in row]
    for piece, place in zip(pieces, places, strict=True):
        at, drawn = (place.row, place.drawn), piece.rollout.completion
        batch.weights[at] = piece.weight
        advantages[at] = piece.rollout.advantage
        sampled[at] = drawn.logprobs
        kept[at] = drawn.logprobs if drawn.processed_logprobs is None else drawn.processed_logprobs
        versions[at] = drawn.versions
    names = [piece.rollout.completion.name for piece in pieces]
    return TokenBatch(
        **vars(batch),
        advantages=advantages,
        sampled_logprobs=sampled,
        processed_logprobs=kept,
        versions=versions,
        places=dict(zip(names, places, strict=True)),
    )


def batches_to_learn(
    rollouts: Sequence[Rollout], *, config: Config, shape: BatchShape, keep_zero_advantage: bool
) -> list[TokenBatch]:
    """A step's rollouts with the weights that the configuration gives them."""
    weights = token_weights(
        rollouts,
        config.learner.variant.token_weights,
        budget=config.rollout.max_new_tokens,
        mask_overlong=config.learner.overlong == "mask",
    )
    return micro_batches(
        rollouts, shape=shape, weights=weights, keep_zero_advantage=keep_zero_advantage
    )


def batches_to_score(completions: Sequence[Completion], *, shape: BatchShape) -> list[TokenBatch]:
    """Completions with equal weights, for scoring; their names must differ."""
    rollouts = [Rollout(completion, "", {}, 0.0, 0.0) for completion in completions]
    assert len({completion.name for completion in completions}) == len(completions)
    weights = [1.0] * len(rollouts)
    return micro_batches(rollouts, shape=shape, weights=weights, keep_zero_advantage=True)
