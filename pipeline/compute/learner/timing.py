"""How long a micro-batch takes in the learner, warm: full rows, from the host and back to it."""

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
"""Of each size, after a first run; the fastest counts: the others waited for something else."""


def micro_batch_s(
    work: Callable[[TokenBatch], None],
    *,
    config: Config,
    shape: BatchShape,
    vocabulary: Vocabulary,
) -> dict[int, float]:
    """Seconds of `work` on a micro-batch of each size, by rows; the largest first.

    Its rows hold as many rollouts of the lengths that are expected as go into them.
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
    barred = {vocabulary.pad, *vocabulary.stops, *vocabulary.forbidden}
    token = next(token for token in range(len(barred) + 1) if token not in barred)
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
