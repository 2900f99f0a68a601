"""Padding and arithmetic of micro-batches with rollouts of very different lengths.

Arithmetic of gemma3-1b with LoRA: 2 operations for each parameter and position in the forward pass,
in its recomputation and in the gradient of the activations; attention counts all scores that the
learner computes (pipeline/compute/model/attention.py), masked or not.
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
    """Returns the tokens of a step's rollouts, prompts included, descending."""

    def lognormal(mean: int, spread: float) -> np.ndarray:
        return rng.lognormal(np.log(mean) - spread**2 / 2, spread, ROLLOUTS).astype(int) + 1

    prompts = np.minimum(lognormal(PROMPT_MEAN, 0.3), LONGEST_PROMPT)
    completions = np.minimum(lognormal(mean, SPREAD), LONGEST - LONGEST_PROMPT)
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
    """Work of `count` rows in full and small micro-batches, empty rows included."""
    shape = BatchShape(rows=MICRO_BATCH // length, tail_rows=DEVICES, length=length, pad=0)
    positions = sum(shape.split(count)) * length
    return _Work(positions, positions * operations(length, MODELS["gemma3_1b"]))


def operations(row: int, model: Mapping[str, Any]) -> float:
    """Returns the operations of a position: forward, recomputation, gradient of the activations."""
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
    """Returns the number of keys that a query is multiplied with."""
    if row <= _QUERY_BLOCK:
        return row
    whole = -(-row // _QUERY_BLOCK) * _QUERY_BLOCK
    return whole if window is None else _QUERY_BLOCK + window - 1
