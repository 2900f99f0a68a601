"""Measures the learner's micro-batches after a warm-up run: full rows, transfers included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from configs.schema import Config
from pipeline.compute.model.timing import fastest_s, plain_token
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.batches import BatchShape, TokenBatch
from pipeline.contracts.rollouts import NO_TEXT, Completion, Rollout, RolloutName
from pipeline.contracts.speeds import Lengths
from pipeline.inputs.dataset.batching import micro_batches

REPEATS = 3
"""Timed runs of each size after a warm-up."""


def micro_batch_s(
    work: Callable[[TokenBatch], None],
    *,
    config: Config,
    shape: BatchShape,
    vocabulary: Vocabulary,
) -> dict[int, float]:
    """Seconds of `work` on a micro-batch of each size, by rows; the largest first.

    Each row holds as many rollouts of the expected length as fit into it, of one prompt if rollouts
    share theirs.
    """
    token = plain_token(vocabulary)
    return {
        rows: fastest_s(partial(work, _batch(rows, config, shape, token)), repeats=REPEATS)
        for rows in shape.sizes
    }


def _batch(rows: int, config: Config, shape: BatchShape, token: int) -> TokenBatch:
    lengths = Lengths.expected(config)
    prompt, new = max(1, round(lengths.prompt)), max(1, round(lengths.completion))
    prefix = prompt - 1
    of_row = (
        (shape.length - prefix) // new if shape.share_prefix else shape.length // (prefix + new)
    )
    rollouts = [
        Rollout(
            Completion(
                name=RolloutName("train", 0, number, 0),
                prompt_tokens=np.full(prompt, token, np.int32),
                tokens=np.full(new, token, np.int32),
                logprobs=np.full(new, -1.0, np.float32),
                stop_reason="length",
                version=0,
                adapter_sha256="",
            ),
            given=NO_TEXT,
            rewards={},
            reward=1.0,
            advantage=1.0,
        )
        for number in range(rows * of_row)
    ]
    weights = [1 / len(rollouts)] * len(rollouts)
    (batch,) = micro_batches(rollouts, shape=shape, weights=weights, keep_zero_advantage=True)
    return batch
