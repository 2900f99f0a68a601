"""Padding and arithmetic of micro-batches with rollouts of very different lengths.

Rows of one rollout each, rows in length buckets, and packed rows. Computed, not timed: arithmetic
of gemma3-1b with LoRA is 2 operations for each parameter and position in the forward pass, in its
recomputation and in the gradient of the activations; attention counts all scores that the learner
computes (pipeline/compute/model/attention.py), masked or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.bench.harness import Row, Section
from pipeline.contracts.batches import BatchShape
from pipeline.contracts.model_shape import ModelShape
from pipeline.inputs.dataset.packing import first_fit
from pipeline.inputs.hub.hf_config import read_model_shape
from pipeline.inputs.hub.model_shape import PUBLISHED

PROMPT_MEAN, COMPLETION_MEANS = 150, (296, 448, 576)
"""Mean tokens of GSM8K's prompts, and of completions as seen in training."""
LONGEST_PROMPT, LONGEST = 320, 1024
SPREAD = 0.6
"""Standard deviation of the logarithm of a completion's length."""
ROLLOUTS, STEPS, DEVICES = 512, 20, 8
MICRO_BATCH = 65_536
"""Positions of a full micro-batch, over all devices."""

_QUERY_BLOCK = 512


def scheme(*, buckets: Sequence[int] = (), row: int | None = None) -> dict[str, Any]:
    """Returns the share of padding and the operations a token for each mean length.

    Args:
        buckets: row lengths; each rollout gets its own row of the smallest fitting length.
        row: instead, pack rollouts into rows of this length, first-fit decreasing.
    """
    shape = read_model_shape(PUBLISHED["gemma-3-1b"])
    found: dict[str, Any] = {"programs": 2 * len(buckets) if row is None else 2}
    for mean in COMPLETION_MEANS:
        rng = np.random.default_rng(mean)
        tokens, positions, flops = 0, 0, 0.0
        for _ in range(STEPS):
            lengths = _lengths(rng, mean)
            tokens += int(lengths.sum())
            for length, rows in used_rows(lengths, buckets=buckets, row=row).items():
                computed = computed_positions(rows, length)
                positions += computed
                flops += computed * operations(length, shape)
        found[f"padding_{mean}"] = 100 * (1 - tokens / positions)
        found[f"gflop_{mean}"] = flops / tokens / 1e9
    return found


def _lengths(rng: np.random.Generator, mean: int) -> np.ndarray:
    """Returns the tokens of a step's rollouts, prompts included, descending."""

    def lognormal(mean: int, spread: float) -> np.ndarray:
        return rng.lognormal(np.log(mean) - spread**2 / 2, spread, ROLLOUTS).astype(int) + 1

    prompts = np.minimum(lognormal(PROMPT_MEAN, 0.3), LONGEST_PROMPT)
    completions = np.minimum(lognormal(mean, SPREAD), LONGEST - LONGEST_PROMPT)
    return np.sort(prompts + completions)[::-1]


def used_rows(
    lengths: np.ndarray, *, buckets: Sequence[int] = (), row: int | None = None
) -> dict[int, int]:
    """Returns the number of rows by their length; arguments as for `scheme`."""
    if row is not None:
        return {row: len(first_fit(lengths.tolist(), capacity=row))}
    return dict(Counter(min(size for size in buckets if size >= length) for length in lengths))


def computed_positions(rows: int, length: int) -> int:
    """Returns the positions of full and small micro-batches, empty rows included."""
    shape = BatchShape(rows=MICRO_BATCH // length, tail_rows=DEVICES, length=length, pad=0)
    return sum(shape.split(rows)) * length


def operations(row: int, shape: ModelShape) -> float:
    """Returns the operations of a position: forward, recomputation, gradient of the activations."""
    keys = shape.local_layers * seen_keys(row, shape.window) * shape.head_dim
    wide = shape.global_head_dim or shape.head_dim
    keys += shape.global_layers * seen_keys(row, None) * wide
    # Scores and weighted values; their gradients are twice as many.
    scores = 4 * shape.heads * keys
    layers = sum(map(shape.layer_parameters, range(shape.layers)))
    return 3 * 2 * (layers + shape.embedding_parameters) + 4 * scores


def seen_keys(row: int, window: int | None) -> int:
    """Returns the number of keys that a query is multiplied with."""
    if row <= _QUERY_BLOCK:
        return row
    whole = -(-row // _QUERY_BLOCK) * _QUERY_BLOCK
    return whole if window is None else _QUERY_BLOCK + window - 1


PACKING = Section(
    "packing",
    "512 rollouts of at most 1,024 tokens on 8 devices, lengths lognormal, micro-batches of 65,536 "
    "positions, gemma3-1b: empty positions, and arithmetic for each real token",
    (
        Row("a row each", scheme, {"buckets": (1024,)}),
        Row("four length buckets", scheme, {"buckets": (256, 512, 768, 1024)}),
        *(Row(f"packed rows of {row:,}", scheme, {"row": row}) for row in (1024, 2048, 4096)),
    ),
)
