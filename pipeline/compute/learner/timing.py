"""Measures the learner's micro-batches after a warm-up run: full rows, transfers included."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from configs.schema import Config
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.batches import BatchShape, TokenBatch
from pipeline.contracts.rollouts import Completion, Rollout, RolloutName
from pipeline.contracts.speeds import Lengths
from pipeline.inputs.dataset.batching import micro_batches

REPEATS = 3
"""Timed runs of each size after a warm-up; the fastest counts, the others were delayed."""


def micro_batch_s(
    work: Callable[[TokenBatch], None],
    *,
    config: Config,
    shape: BatchShape,
    vocabulary: Vocabulary,
) -> dict[int, float]:
    """Seconds of `work` on a micro-batch of each size, by rows; the largest first.

    Each row holds as many rollouts of the expected length as fit into it.
    """
    found = {}
    for rows in shape.sizes:
        batch, seconds = _batch(rows, config=config, shape=shape, vocabulary=vocabulary), []
        for _ in range(1 + REPEATS):
            began = time.perf_counter()
            work(batch)
            seconds.append(time.perf_counter() - began)
        found[rows] = min(seconds[1:])
    return found


def _batch(rows: int, *, config: Config, shape: BatchShape, vocabulary: Vocabulary) -> TokenBatch:
    lengths = Lengths.expected(config)
    prompt, new = max(1, round(lengths.prompt)), max(1, round(lengths.completion))
    special = {vocabulary.pad, *vocabulary.stops, *vocabulary.forbidden}
    token = next(token for token in range(len(special) + 1) if token not in special)
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
            text="",
            rewards={},
            reward=1.0,
            advantage=1.0,
        )
        for number in range(rows * (shape.length // (prompt + new)))
    ]
    weights = [1 / len(rollouts)] * len(rollouts)
    (batch,) = micro_batches(rollouts, shape=shape, weights=weights, keep_zero_advantage=True)
    return batch
