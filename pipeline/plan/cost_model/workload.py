"""How much a step has to do: lengths as they are expected, decode steps by slots, packed rows.

Lengths are not known before a run; they are assumed here, in one place, until somebody measures.
The host's loop around the slots is the engine's, played through with numbers instead of tokens.
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

_AVERAGED = 256
"""Completions over which what drawing takes is averaged, at least."""


@lru_cache(maxsize=64)
def completion_lengths(count: int, *, mean: float, cap: int) -> tuple[int, ...]:
    """So many lengths at the even quantiles of a lognormal that is cut at `cap`.

    Their mean is `mean` to within a token, where the cap allows it. Shuffled, always alike.
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
class Turns:
    """What drawing takes on one sampler's devices.

    Attributes:
        segments: by the slots of a device that they run.
        fills: how often slots are given to those who wait.
    """

    segments: dict[int, float]
    fills: float


def decode_turns(
    lengths: Sequence[int], *, sizes: Sequence[int], segment_steps: int, shards: int = 1
) -> Turns:
    """What drawing these lengths takes.

    As the engine does: a slot that has ended between two segments is given to the next; once nobody
    waits, the rest moves into fewer slots as soon as it fits. All devices run the same program, so
    the one with the most left decides. Who is free takes the next one: that the engine keeps a
    group on one device while others have prompts of their own is not counted.

    Args:
        lengths: in the order in which they are asked for.
        sizes: slots of a device, falling; the first are those that there are at most.
        segment_steps: decode steps of a segment.
        shards: devices.
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
        # Nothing changes until the first of them ends.
        segments = min(map(min, filter(None, busy)))
        found[left[0]] += segments
        busy = [[rest - segments for rest in own if rest > segments] for own in busy]
    return Turns({size: count for size, count in found.items() if count}, fills)


@lru_cache(maxsize=4096)
def expected_turns(
    count: int, *, mean: float, cap: int, sizes: tuple[int, ...], segment_steps: int, shards: int
) -> Turns:
    """What drawing so many completions takes on average.

    Which of a few is the longest, and when its turn comes, is chance, so steps of few are played
    through several times, with other lengths each time.

    Args:
        count: completions.
        mean: tokens of one.
        cap: most tokens of one.
        sizes: slots of a device, falling.
        segment_steps: decode steps of a segment.
        shards: devices.
    """
    steps = math.ceil(_AVERAGED / count)
    lengths = completion_lengths(steps * count, mean=mean, cap=cap)
    segments, fills = dict.fromkeys(sizes, 0.0), 0.0
    for first in range(0, len(lengths), count):
        own = lengths[first : first + count]
        turns = decode_turns(own, sizes=sizes, segment_steps=segment_steps, shards=shards)
        fills += turns.fills / steps
        for size, number in turns.segments.items():
            segments[size] += number / steps
    return Turns({size: number for size, number in segments.items() if number}, fills)


def packed_positions(config: Config, lengths: Lengths, *, sequences: int) -> list[int]:
    """Positions of the learner's micro-batches that hold so many sequences, over all devices.

    Rows fill to what `launch.bench learner --only "packing*"` has found: about 85% where a row is
    the longest sequence, 95% where it is twice as long. The last micro-batches are small ones.
    """
    row = config.row_tokens
    empty = 0.15 * (config.rollout.max_tokens / row) ** 1.5
    rows = max(1, math.ceil(sequences * lengths.sequence / ((1 - empty) * row)))
    shape = BatchShape(config.micro_batch_rows, config.plan.learner_shards, row, pad=0)
    return [size * row for size in shape.split(rows)]
