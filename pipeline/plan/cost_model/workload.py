"""The work of a step: expected completion lengths, decode segments by slots, packed rows.

Lengths are unknown before a run; this module assumes a distribution until they are measured. The
decode schedule simulates the engine's host loop with lengths instead of tokens.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from configs.schema import Config
from pipeline.contracts.batches import BatchShape
from pipeline.contracts.speeds import SIGMA, Lengths
from pipeline.inputs.dataset.batching import row_fill

_AVERAGED = 256
"""Least number of completions over which a decode schedule is averaged."""


@lru_cache(maxsize=64)
def completion_lengths(count: int, *, mean: float, cap: int) -> tuple[int, ...]:
    """`count` lengths at even quantiles of a lognormal distribution truncated at `cap`.

    Their mean is within a token of `mean`, where the cap allows it. Shuffled with a fixed seed.
    """
    normal = [math.exp(SIGMA * NormalDist().inv_cdf((n + 0.5) / count)) for n in range(count)]

    def lengths(median: float) -> list[int]:
        return [min(cap, max(1, round(median * factor))) for factor in normal]

    low, high = 0.5, 64.0 * cap
    for _ in range(32):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sum(lengths(middle)) < mean * count else (low, middle)
    found = lengths(high)
    random.Random(0).shuffle(found)
    return tuple(found)


@dataclass(frozen=True)
class DecodeSchedule:
    """The program runs of generating some completions on one sampler.

    Attributes:
        segments: number of segments, by slots of a device.
        fills: number of times that free slots are filled.
    """

    segments: dict[int, float]
    fills: float


def decode_schedule(
    lengths: Sequence[int], *, sizes: Sequence[int], segment_steps: int, shards: int = 1
) -> DecodeSchedule:
    """The schedule of generating completions of these lengths.

    As in the engine, a slot that finishes during a segment is filled after it; when no completion
    waits, the rest moves to a smaller bucket as soon as it fits. All devices run the same program,
    so the fullest one decides. A free slot takes the next completion: the engine's rule that keeps
    a group on one device while others have prompts of their own is not simulated.

    Args:
        lengths: completion lengths, in the order of the requests.
        sizes: slots of a device, decreasing; the first is the full number.
        segment_steps: decode steps of a segment.
        shards: number of devices.
    """
    waiting = deque(math.ceil(length / segment_steps) for length in lengths)
    busy: list[list[int]] = [[] for _ in range(shards)]
    left, found, fills = list(sizes), dict.fromkeys(sizes, 0), 0
    while waiting or any(busy):
        free = left[0] * shards - sum(map(len, busy))
        fills += bool(waiting) and free > 0
        for _ in range(min(free, len(waiting))):
            min(busy, key=len).append(waiting.popleft())
        while not waiting and len(left) > 1 and max(map(len, busy)) <= left[1]:
            left.pop(0)
        # Nothing changes until the first slot finishes.
        segments = min(map(min, filter(None, busy)))
        found[left[0]] += segments
        busy = [[rest - segments for rest in own if rest > segments] for own in busy]
    return DecodeSchedule({size: count for size, count in found.items() if count}, fills)


@lru_cache(maxsize=4096)
def expected_schedule(
    count: int, *, mean: float, cap: int, sizes: tuple[int, ...], segment_steps: int, shards: int
) -> DecodeSchedule:
    """The average schedule of generating `count` completions.

    With few completions the longest one and its position vary, so the average runs over several
    steps with different lengths.

    Args:
        count: number of completions.
        mean: mean tokens of a completion.
        cap: most tokens of a completion.
        sizes: slots of a device, decreasing.
        segment_steps: decode steps of a segment.
        shards: number of devices.
    """
    steps = math.ceil(_AVERAGED / count)
    lengths = completion_lengths(steps * count, mean=mean, cap=cap)
    segments, fills = dict.fromkeys(sizes, 0.0), 0.0
    for first in range(0, len(lengths), count):
        own = lengths[first : first + count]
        schedule = decode_schedule(own, sizes=sizes, segment_steps=segment_steps, shards=shards)
        fills += schedule.fills / steps
        for size, number in schedule.segments.items():
            segments[size] += number / steps
    return DecodeSchedule({size: number for size, number in segments.items() if number}, fills)


def packed_positions(config: Config, lengths: Lengths, *, sequences: int) -> list[int]:
    """Positions of each micro-batch that the learner packs `sequences` into, over all devices.

    The last micro-batches are smaller.
    """
    row = config.row_tokens
    rows = max(1, math.ceil(sequences * lengths.sequence / (row_fill(config) * row)))
    shape = BatchShape(config.micro_batch_rows, config.plan.learner_shards, row, pad=0)
    return [size * row for size in shape.split(rows)]
