"""How much a step has to do: lengths as they are expected, decode steps by slots, packed rows.

Lengths are not known before a run; they are assumed here, in one place, until somebody measures.
The host's loop around the slots is the engine's, played through with numbers instead of tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from configs.schema import Config
from pipeline.data.packing import BatchShape

SIGMA, MEAN_SHARE = 0.8, 0.35
"""Completions are lognormal with this deviation of the logarithm and this share of the cap as mean:
the lengths of `launch.bench rollout`."""
PROMPT_SHARE = 0.5
"""Mean of the prompts as a share of the longest."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens.

    Attributes:
        prompt: of a prompt.
        completion: of a completion.
    """

    prompt: float
    completion: float

    @property
    def sequence(self) -> float:
        """Of both."""
        return self.prompt + self.completion

    @staticmethod
    def expected(config: Config, completion: float | None = None) -> Lengths:
        """What is assumed; of completions, `completion` where somebody knows it.

        Raises:
            ValueError: if no completion can be that long on average.
        """
        rollout = config.rollout
        if completion is None:
            completion = MEAN_SHARE * rollout.max_new_tokens
        elif not 1 <= completion <= rollout.max_new_tokens:
            raise ValueError(
                f"command line: --completion-tokens {completion:g}: must be from 1 to "
                f"rollout.max_new_tokens = {rollout.max_new_tokens}"
            )
        return Lengths(max(1.0, PROMPT_SHARE * rollout.max_prompt_tokens), completion)


@lru_cache(maxsize=64)
def completion_lengths(count: int, *, mean: float, cap: int) -> tuple[int, ...]:
    """So many lengths at the even quantiles of a lognormal that is cut at `cap`.

    Their mean is `mean` to within a token, where the cap allows it. In an order that is fixed and
    like a shuffled one: neighbours are no longer or shorter than others.
    """
    normal = [math.exp(SIGMA * NormalDist().inv_cdf((n + 0.5) / count)) for n in range(count)]

    def lengths(median: float) -> list[int]:
        return [min(cap, max(1, round(median * factor))) for factor in normal]

    low, high = 0.5, 64.0 * cap
    for _ in range(32):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sum(lengths(middle)) < mean * count else (low, middle)
    found = lengths(high)
    stride = next(n for n in range(max(1, int(0.618 * count)), 2 * count + 2) if _coprime(n, count))
    return tuple(found[(n * stride) % count] for n in range(count))


def _coprime(a: int, b: int) -> bool:
    return math.gcd(a, b) == 1


@dataclass(frozen=True)
class Turns:
    """What drawing takes on one device.

    Attributes:
        segments: by the slots that they run.
        fills: how often slots are given to those who wait.
    """

    segments: dict[int, int]
    fills: int


def decode_turns(lengths: Sequence[int], *, sizes: Sequence[int], segment_steps: int) -> Turns:
    """What drawing these lengths takes on one device.

    As the engine does: a slot that has ended between two segments is given to the next; once nobody
    waits, the rest moves into fewer slots as soon as it fits.

    Args:
        lengths: in the order in which they are asked for.
        sizes: slots, falling; the first are those that there are at most.
        segment_steps: decode steps of a segment.
    """
    waiting = deque(math.ceil(length / segment_steps) for length in lengths)
    busy: list[int] = []
    left, found, fills = list(sizes), dict.fromkeys(sizes, 0), 0
    while waiting or busy:
        fills += bool(waiting) and len(busy) < left[0]
        while waiting and len(busy) < left[0]:
            busy.append(waiting.popleft())
        while not waiting and len(left) > 1 and len(busy) <= left[1]:
            left.pop(0)
        # Nothing changes until the first of them ends.
        segments = min(busy)
        found[left[0]] += segments
        busy = [rest - segments for rest in busy if rest > segments]
    return Turns({size: count for size, count in found.items() if count}, fills)


def decode_segments(
    lengths: Sequence[int], *, sizes: Sequence[int], segment_steps: int
) -> dict[int, int]:
    """The segments of `decode_turns`."""
    return decode_turns(lengths, sizes=sizes, segment_steps=segment_steps).segments


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
