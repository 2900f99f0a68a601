"""Positions and arithmetic of micro-batches with rollouts of very different lengths.

Rows of one rollout each, rows in length buckets, and packed rows, whose groups share their prompts
or not. Computed, not timed: arithmetic of gemma3-1b with LoRA is 2 operations for each parameter
and position in the forward pass, in its recomputation and in the gradient of the activations, the
head at learned positions only; attention counts all scores that the learner computes with XLA
(pipeline/compute/model/attention.py), masked or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.bench.harness import Row, Section
from pipeline.compute.model.attention import band_sizes
from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import read_model_shape
from pipeline.data.models.model_shape import ModelShape
from pipeline.data.packed_batch import BatchShape
from pipeline.data.packing import first_fit

PROMPT_MEAN, COMPLETION_MEANS = 150, (296, 448, 576)
"""Mean tokens of GSM8K's prompts, and of completions as seen in training."""
LONGEST_PROMPT, LONGEST = 320, 1024
SPREAD = 0.6
"""Standard deviation of the logarithm of a completion's length."""
GROUP, PROMPTS, STEPS, DEVICES = 16, 32, 20, 8
MICRO_BATCH = 65_536
"""Positions of a full micro-batch, over all devices."""


@dataclass(frozen=True)
class DrawnRollout:
    """A rollout as a `PackableSequence` of zeros; those of a group have the same prompt."""

    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.completion_tokens)


def scheme(
    *, buckets: Sequence[int] = (), row: int | None = None, share: bool = False
) -> dict[str, Any]:
    """Returns positions and operations for each learned token, by mean length.

    Args:
        buckets: row lengths; each rollout gets its own row of the smallest fitting length.
        row: instead, pack rollouts into rows of this length.
        share: whether the rollouts of a group share their prompt in a row.
    """
    shape = read_model_shape(PUBLISHED["gemma-3-1b"])
    found: dict[str, Any] = {"programs": 2 * len(buckets) if row is None else 2}
    for mean in COMPLETION_MEANS:
        rng = np.random.default_rng(mean)
        learned, held, positions, flops = 0, 0, 0, 0.0
        for _ in range(STEPS):
            groups = _groups(rng, mean)
            used, tokens = used_rows(groups, buckets=buckets, row=row, share=share)
            learned += sum(len(one.completion_tokens) for group in groups for one in group)
            held += tokens
            for length, rows in used.items():
                computed = computed_positions(rows, length)
                positions += computed
                flops += computed * operations(length, shape, shared=share)
        flops += learned * 3 * 2 * shape.embedding_parameters
        found[f"positions_{mean}"] = positions / learned
        found[f"padding_{mean}"] = 100 * (1 - held / positions)
        found[f"gflop_{mean}"] = flops / learned / 1e9
    return found


def _groups(rng: np.random.Generator, mean: int) -> list[list[DrawnRollout]]:
    """Returns the rollouts of a step by group."""

    def lognormal(mean: int, spread: float, count: int, most: int) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, count).astype(int) + 1
        return np.minimum(drawn, most)

    groups = []
    for prompt in lognormal(PROMPT_MEAN, 0.3, PROMPTS, LONGEST_PROMPT):
        shared = np.zeros(prompt, np.int32)
        lengths = lognormal(mean, SPREAD, GROUP, LONGEST - LONGEST_PROMPT)
        groups.append([DrawnRollout(shared, np.zeros(length, np.int32)) for length in lengths])
    return groups


def used_rows(
    groups: Sequence[Sequence[DrawnRollout]],
    *,
    buckets: Sequence[int] = (),
    row: int | None = None,
    share: bool = False,
) -> tuple[dict[int, int], int]:
    """Returns the number of rows by their length, and the positions that hold tokens."""
    alone = [[one] for group in groups for one in group]
    if row is None:
        sizes = (min(size for size in buckets if size >= len(one)) for [one] in alone)
        return dict(Counter(sizes)), sum(len(one) for [one] in alone)
    longest_first = [sorted(group, key=len, reverse=True) for group in (groups if share else alone)]
    longest_first.sort(key=lambda group: len(group[0]), reverse=True)
    packed = first_fit(longest_first, capacity=row)
    parts = [part for parts in packed for part in parts]
    own = sum(len(one.completion_tokens) for part in parts for one in part)
    return {row: len(packed)}, own + sum(len(part[0].prompt_tokens) - 1 for part in parts)


def computed_positions(rows: int, length: int) -> int:
    """Returns the positions of full and small micro-batches, empty rows included."""
    shape = BatchShape(rows=MICRO_BATCH // length, tail_rows=DEVICES, length=length, pad=0)
    return sum(shape.split(rows)) * length


def operations(row: int, shape: ModelShape, *, shared: bool = False) -> float:
    """Returns the operations of a position without the head, and of the attention of its row.

    Forward, recomputation, and gradient of the activations.
    """
    keys = shape.local_layers * seen_keys(row, shape.window, shared=shared) * shape.head_dim
    wide = shape.global_head_dim or shape.head_dim
    keys += shape.global_layers * seen_keys(row, None, shared=shared) * wide
    # Scores and weighted values; their gradients are twice as many.
    scores = 4 * shape.heads * keys
    layers = sum(map(shape.layer_parameters, range(shape.layers)))
    return 3 * 2 * layers + 4 * scores


def seen_keys(row: int, window: int | None, *, shared: bool = False) -> int:
    """Returns the number of keys that a query is multiplied with."""
    prompt, completion = (LONGEST_PROMPT, LONGEST - LONGEST_PROMPT) if shared else (0, None)
    size, before = band_sizes(row, window, prompt=prompt, completion=completion)
    return row if before is None else (before + 1) * size + prompt


PACKING = Section(
    "packing",
    "32 groups of 16 rollouts of at most 1,024 tokens on 8 devices, lengths lognormal, "
    "micro-batches of 65,536 positions, gemma3-1b: positions, empty ones, and arithmetic for each "
    "learned token",
    (
        Row("a row each", scheme, {"buckets": (1024,)}),
        Row("four length buckets", scheme, {"buckets": (256, 512, 768, 1024)}),
        *(
            Row(
                f"packed rows of {row:,}{', shared prompts' * share}",
                scheme,
                {"row": row, "share": share},
            )
            for share in (False, True)
            for row in (1024, 2048, 4096)
        ),
    ),
)
