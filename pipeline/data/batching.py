"""Packs rollouts into micro-batches of fixed shapes and assigns token weights in the loss.

Weights are normalized over the whole step before it is split, so the sum of the micro-batches'
gradients equals the gradient of the unsplit, unpacked batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from configs.learner import TokenWeights
from configs.schema import Config
from pipeline.data.packed_batch import BatchShape, TokenBatch
from pipeline.data.packing import first_fit, lay_out
from pipeline.plan.lengths import Lengths
from pipeline.types import NO_TEXT, Completion, Rollout


def batch_shape(config: Config, *, pad: int) -> BatchShape:
    """The sizes of the learner's micro-batches; a small one has one row per shard."""
    return BatchShape(
        rows=config.micro_batch_rows,
        tail_rows=config.plan.learner_shards,
        length=config.row_tokens,
        pad=pad,
        share_prefix=config.shares_prefix,
    )


_SHARED_FILL = 0.97
"""Share of a row's positions that hold tokens where prompts are shared."""


@dataclass(frozen=True)
class Packing:
    """What packed rows hold on average.

    Attributes:
        positions: positions of the rows for each rollout, with padding.
        tokens: those of them that hold tokens.
        learned: share of the positions that predict a token of a completion.
        sequence: length of a sequence whose tokens attend to as many keys on average.
    """

    positions: float
    tokens: float
    learned: float
    sequence: float

    @staticmethod
    def expected(config: Config, lengths: Lengths) -> Packing:
        """At these mean lengths, fitted to packed rows of lognormal lengths.

        Without shared prompts about 85% of a row's positions hold tokens where it is as long as
        the longest sequence, 95% where it is twice as long. With them about 97% do, and each row
        begins with the rest of a group that another row has a part of, and repeats its prompt.
        """
        prompt, own, row = lengths.prompt - 1, lengths.completion, config.row_tokens
        if not config.shares_prefix:
            fill = 1 - 0.15 * (config.rollout.max_tokens / row) ** 1.5
            tokens, keys = prompt + own, (prompt + own) / 2
        else:
            fill, group = _SHARED_FILL, config.rollout.group_size
            shared = prompt * (1 / group + own / (row - prompt))
            tokens = shared + own
            keys = (shared * prompt / 2 + own * (prompt + own / 2)) / tokens
        positions = tokens / fill
        return Packing(positions, tokens, learned=own / positions, sequence=2 * keys)


def token_weights(
    rollouts: Sequence[Rollout], mode: TokenWeights, *, budget: int, mask_overlong: bool = False
) -> list[float]:
    """Weight of each token of each rollout; 0 for excluded rollouts.

    Over the N included rollouts, L being the sum of the loss weights of a rollout's tokens:

        sequence   1 / (N L)         mean over rollouts of means (GRPO, arXiv:2402.03300)
        token      1 / (sum of L)    mean over all tokens (DAPO, arXiv:2503.14476)
        constant   1 / (N budget)    no division by length (Dr. GRPO, arXiv:2503.20783)

    `budget` is the maximum of a completion. Rollouts without a reward are excluded, and with
    `mask_overlong` those that were truncated by length.
    """
    lengths = [
        0
        if rollout.reward is None or (mask_overlong and rollout.completion.stop_reason == "length")
        else float(rollout.completion.loss_weights.sum())
        for rollout in rollouts
    ]
    total, count = sum(lengths), sum(length > 0 for length in lengths)
    if mode == "token":
        return [1.0 / total if length else 0.0 for length in lengths]
    if mode == "constant":
        return [1.0 / (count * budget) if length else 0.0 for length in lengths]
    return [1.0 / (count * length) if length else 0.0 for length in lengths]


@dataclass(frozen=True)
class _WeightedRollout:
    """A rollout as a `PackableSequence`, with the weight of its tokens."""

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
    """Packs a step's rollouts, longest first, into full micro-batches, then small ones.

    The result does not depend on their order. With `shape.share_prefix` the rollouts of a prompt
    follow each other. Those of weight 0 are excluded; with `keep_zero_advantage` those of advantage
    0 are not, which have no policy gradient but one of the KL term.

    Raises:
        ValueError: if a rollout is longer than a row.
    """
    included = [
        _WeightedRollout(rollout, weight)
        for rollout, weight in zip(rollouts, weights, strict=True)
        if weight and (keep_zero_advantage or rollout.advantage)
    ]
    included.sort(key=lambda sequence: (-len(sequence), sequence.rollout.completion.name))
    groups: dict[object, list[_WeightedRollout]] = {}
    for sequence in included:
        completion = sequence.rollout.completion
        group = completion.prompt_tokens.tobytes() if shape.share_prefix else completion.name
        groups.setdefault(group, []).append(sequence)
    packed = first_fit(list(groups.values()), capacity=shape.length)
    rows = iter(packed)
    return [_fill(list(islice(rows, size)), size, shape) for size in shape.split(len(packed))]


def _fill(
    packed: Sequence[Sequence[Sequence[_WeightedRollout]]], rows: int, shape: BatchShape
) -> TokenBatch:
    batch, slices = lay_out(packed, rows=rows, shape=shape, share_prefix=shape.share_prefix)
    advantages, sampled, processed = (np.zeros_like(batch.weights) for _ in range(3))
    versions = np.zeros_like(batch.tokens)
    sequences = [sequence for row in packed for group in row for sequence in group]
    for sequence, where in zip(sequences, slices, strict=True):
        at, completion = (where.row, where.positions), sequence.rollout.completion
        batch.weights[at] = sequence.weight * completion.loss_weights
        advantages[at] = sequence.rollout.advantage
        sampled[at] = completion.logprobs
        processed[at] = (
            completion.logprobs
            if completion.processed_logprobs is None
            else completion.processed_logprobs
        )
        versions[at] = completion.versions
    names = [sequence.rollout.completion.name for sequence in sequences]
    return TokenBatch(
        **vars(batch),
        advantages=advantages,
        sampled_logprobs=sampled,
        processed_logprobs=processed,
        versions=versions,
        completions=dict(zip(names, slices, strict=True)),
    )


def batches_to_learn(
    rollouts: Sequence[Rollout], *, config: Config, shape: BatchShape, keep_zero_advantage: bool
) -> list[TokenBatch]:
    """Micro-batches of a step's rollouts for the update, with the configured token weights."""
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
    """Micro-batches of completions for scoring; their names must differ."""
    rollouts = [Rollout(completion, NO_TEXT, {}, 0.0, 0.0) for completion in completions]
    assert len({completion.name for completion in completions}) == len(completions)
    weights = [1.0] * len(rollouts)
    return micro_batches(rollouts, shape=shape, weights=weights, keep_zero_advantage=True)
