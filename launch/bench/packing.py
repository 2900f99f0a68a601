"""How rollouts of very different lengths become micro-batches: padding and arithmetic, counted.

Arithmetic of gemma3-1b with a LoRA: 2 operations for each parameter and position in the forward
pass, its repetition in the backward pass and the gradient of the activations; of attention the
scores that the learner computes (pipeline/compute/model/attention.py), masked or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.bench.models import MODELS
from pipeline.contracts.batches import BatchShape
from pipeline.inputs.dataset.packing import first_fit

PROMPT_MEAN, COMPLETION_MEANS = 150, (296, 448, 576)
"""Tokens; GSM8K's prompts, and completions as they were seen in training."""
LONGEST_PROMPT, LONGEST = 320, 1024
SPREAD = 0.6
"""Deviation of the logarithm of a completion's length."""
ROLLOUTS, STEPS, DEVICES = 512, 20, 8
MICRO_BATCH = 65_536
"""Positions of a full micro-batch, over all devices."""

_QUERY_BLOCK = 512


def scheme(*, buckets: Sequence[int] = (), row: int | None = None) -> dict[str, Any]:
    """Share of padding and operations a token for each mean length, over some steps.

    Args:
        buckets: each rollout has a row of its own, of the smallest of these lengths that holds it.
        row: instead, rollouts are packed into rows of this length, first-fit decreasing.
    """
    found: dict[str, Any] = {"programs": 2 * len(buckets) if row is None else 2}
    for mean in COMPLETION_MEANS:
        rng = np.random.default_rng(mean)
        steps = [_lengths(rng, mean) for _ in range(STEPS)]
        work = _Work(0, 0.0)
        for lengths in steps:
            work += _packed(lengths, row) if row is not None else _bucketed(lengths, buckets)
        tokens = int(sum(lengths.sum() for lengths in steps))
        found[f"padding_{mean}"] = 100 * (1 - tokens / work.positions)
        found[f"gflop_{mean}"] = work.operations / tokens / 1e9
    return found


@dataclass(frozen=True)
class _Work:
    positions: int
    operations: float

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.positions + other.positions, self.operations + other.operations)


def _lengths(rng: np.random.Generator, mean: int) -> np.ndarray:
    """Tokens of a step's rollouts, prompts included, descending."""

    def drawn(mean: int, spread: float) -> np.ndarray:
        return rng.lognormal(np.log(mean) - spread**2 / 2, spread, ROLLOUTS).astype(int) + 1

    prompts = np.minimum(drawn(PROMPT_MEAN, 0.3), LONGEST_PROMPT)
    completions = np.minimum(drawn(mean, SPREAD), LONGEST - LONGEST_PROMPT)
    return np.sort(prompts + completions)[::-1]


def _packed(lengths: np.ndarray, row: int) -> _Work:
    return _rows(len(first_fit(list(map(int, lengths)), capacity=row)), row)


def _bucketed(lengths: np.ndarray, buckets: Sequence[int]) -> _Work:
    held = np.searchsorted(np.sort(buckets), lengths)
    work = _Work(0, 0.0)
    for number, bucket in enumerate(sorted(buckets)):
        work += _rows(int((held == number).sum()), bucket)
    return work


def _rows(count: int, length: int) -> _Work:
    """So many rows in full micro-batches and small ones, empty rows included."""
    shape = BatchShape(rows=MICRO_BATCH // length, tail_rows=DEVICES, length=length, pad=0)
    positions = sum(shape.split(count)) * length
    return _Work(positions, positions * operations(length, MODELS["gemma3_1b"]))


def operations(row: int, model: Mapping[str, Any]) -> float:
    """Of one position in a row of this length: forward, again, and the activations' gradient."""
    width, mlp = model["hidden_size"], model["intermediate_size"]
    heads, kv, size = (
        model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layers, window = model["num_hidden_layers"], model["sliding_window"]
    matrices = width * size * (2 * heads + 2 * kv) + 3 * width * mlp
    everywhere = layers // model["sliding_window_pattern"]
    # Scores and weighted values; their gradients are twice as many.
    scores = (
        4
        * heads
        * size
        * (everywhere * keys(row, None) + (layers - everywhere) * keys(row, window))
    )
    return 3 * 2 * (layers * matrices + width * model["vocab_size"]) + 4 * scores


def keys(row: int, window: int | None) -> int:
    """Keys that a query is multiplied with."""
    if row <= _QUERY_BLOCK:
        return row
    whole = -(-row // _QUERY_BLOCK) * _QUERY_BLOCK
    return whole if window is None else _QUERY_BLOCK + window - 1
