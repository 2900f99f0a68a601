"""Times compiled programs on their devices, after a warm-up run."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from configs.schema import Config
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.batching import micro_batches
from pipeline.data.packed_batch import BatchShape, TokenBatch
from pipeline.plan.lengths import Lengths
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName, Segment

REPEATS = 3
"""Timed runs after the warm-up; the fastest counts, because the others were delayed."""


def fastest_s(work: Callable[[], object], *, before: Callable[[], None] | None = None) -> float:
    """Seconds of the fastest of `REPEATS` runs after a warm-up.

    Args:
        work: waits for its results.
        before: runs before each of them, untimed.
    """
    seconds = []
    for _ in range(1 + REPEATS):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def plain_token(vocabulary: Vocabulary) -> int:
    """A token without a special meaning."""
    special = {vocabulary.pad, *vocabulary.stops, *vocabulary.forbidden}
    return next(token for token in range(len(special) + 1) if token not in special)


def full_micro_batch(config: Config, *, shape: BatchShape, token: int) -> TokenBatch:
    """A micro-batch of the largest size, whose rows are full of rollouts of the expected length.

    Args:
        config: of the run; a row of rollouts that share their prompt holds it once.
        shape: of the micro-batches.
        token: of which all rollouts consist.
    """
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
                segments=(
                    Segment(np.full(new, token, np.int32), np.full(new, -1.0, np.float32), 0, ""),
                ),
                stop_reason="length",
            ),
            given=NO_TEXT,
            rewards={},
            reward=1.0,
            advantage=1.0,
        )
        for number in range(shape.sizes[0] * of_row)
    ]
    weights = [1 / len(rollouts)] * len(rollouts)
    (batch,) = micro_batches(rollouts, shape=shape, weights=weights, keep_zero_advantage=True)
    return batch
