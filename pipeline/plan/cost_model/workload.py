"""The work of a step: expected completion lengths, decode segments by slots, packed rows.

Lengths are unknown before a run; this module assumes a distribution until they are measured. The
decode schedule simulates the engine's host loop with lengths instead of tokens.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist

from configs.rollout import min_finished
from configs.schema import Config
from pipeline.data.batching import Packing
from pipeline.data.packed_batch import BatchShape
from pipeline.plan.lengths import Lengths

_SIGMA = 0.8
"""Standard deviation of the logarithm of completion lengths, which are lognormal, as in
`launch.bench rollout`."""
_AVERAGED = 256
"""Least number of completions over which a sampler's work is averaged."""
_AVERAGED_CUT_OFF = 2048
"""The same with a cut-off, where steps depend on those before."""


@lru_cache(maxsize=64)
def completion_lengths(count: int, *, mean: float, cap: int) -> tuple[int, ...]:
    """`count` lengths at even quantiles of a lognormal distribution truncated at `cap`.

    Their mean is within a token of `mean`, where the cap allows it. Shuffled with a fixed seed.
    """
    normal = [math.exp(_SIGMA * NormalDist().inv_cdf((n + 0.5) / count)) for n in range(count)]

    def lengths(median: float) -> list[int]:
        return [min(cap, max(1, round(median * factor))) for factor in normal]

    low, high = 0.5, 64.0 * cap
    for _ in range(32):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sum(lengths(middle)) < mean * count else (low, middle)
    found = lengths(high)
    random.Random(0).shuffle(found)
    return tuple(found)


def decode_schedule(
    lengths: Sequence[int],
    *,
    sizes: Sequence[int],
    segment_steps: int,
    shards: int = 1,
    least: int | None = None,
) -> tuple[dict[int, int], dict[int, int]]:
    """The schedule of generating completions of these lengths on one sampler.

    As in the engine, a slot that finishes during a segment is filled after it; when no completion
    waits, the rest moves to a smaller bucket as soon as it fits. All devices run the same program,
    so the fullest one decides. A free slot takes the next completion: the engine's rule that keeps
    a group on one device while others have prompts of their own is not simulated.

    Args:
        lengths: completion lengths, in the order of the requests.
        sizes: slots of a device, decreasing; the first is the full number.
        segment_steps: decode steps of a segment.
        shards: number of devices.
        least: number of completions that must finish, checked between segments; None: all.

    Returns:
        The number of segments, by slots of a device; the tokens that completions still need which
            are truncated at the cut-off, by index.
    """
    waiting = deque(enumerate(lengths))
    busy: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    unfinished = len(lengths) - (len(lengths) if least is None else least)
    left, found = list(sizes), dict.fromkeys(sizes, 0)
    while len(waiting) + sum(map(len, busy)) > unfinished:
        free = left[0] * shards - sum(map(len, busy))
        for _ in range(min(free, len(waiting))):
            min(busy, key=len).append(waiting.popleft())
        while not waiting and len(left) > 1 and max(map(len, busy)) <= left[1]:
            left.pop(0)
        # Nothing changes until the first slot finishes.
        segments = math.ceil(min(rest for own in busy for _, rest in own) / segment_steps)
        found[left[0]] += segments
        tokens = segments * segment_steps
        busy = [[(at, rest - tokens) for at, rest in own if rest > tokens] for own in busy]
    rest = {at: tokens for own in (*busy, waiting) for at, tokens in own}
    return {size: count for size, count in found.items() if count}, rest


@dataclass(frozen=True)
class MeanWork:
    """Means over the steps of a sampler.

    Attributes:
        segments: number of segments, by slots of a device.
        trained: completions that a step trains on, as a share of the new ones.
        trained_tokens: their tokens, as a share of those of the new ones.
        continued: completions that an earlier step began.
        held_tokens: tokens that each of these has from there.
    """

    segments: dict[int, float]
    trained: float
    trained_tokens: float
    continued: float
    held_tokens: float


@lru_cache(maxsize=4096)
def mean_work(
    count: int,
    *,
    mean: float,
    cap: int,
    sizes: tuple[int, ...],
    segment_steps: int,
    shards: int,
    cut_off: float | None,
    keeps: bool,
) -> MeanWork:
    """The mean work of steps with `count` new completions each; see `decode_schedule`.

    With few completions the longest one and its position vary, so the mean is over several steps
    with different lengths. With a cut-off, the share of the requests that must finish, as many
    steps go before them; if it `keeps` the others, they are requested again in the next step.
    """
    steps = math.ceil((_AVERAGED if cut_off is None else _AVERAGED_CUT_OFF) / count)
    lengths = completion_lengths(steps * count, mean=mean, cap=cap)
    schedule = partial(decode_schedule, sizes=sizes, segment_steps=segment_steps, shards=shards)
    totals, segments = Counter[str](), dict.fromkeys(sizes, 0.0)
    begun: list[tuple[int, int]] = []
    for step in range(steps if cut_off is None else 2 * steps):
        first = step % steps * count
        own = [*begun, *((length, length) for length in lengths[first : first + count])]
        least = None if cut_off is None else min_finished(len(own), cut_off=cut_off)
        run, left = schedule([rest for _, rest in own], least=least)
        if cut_off is None or step >= steps:
            totals += _counts(own, left)
            for size, number in run.items():
                segments[size] += number / steps
        begun = [(own[at][0], rest) for at, rest in left.items()] if keeps else []
    requested = sum(lengths)
    return MeanWork(
        {size: number for size, number in segments.items() if number},
        trained=totals["trained"] / (steps * count),
        trained_tokens=totals["trained_tokens"] / requested,
        continued=totals["continued"] / steps,
        held_tokens=totals["held_tokens"] / max(1, totals["continued"]),
    )


def _counts(own: Sequence[tuple[int, int]], left: Mapping[int, int]) -> Counter[str]:
    """What a step does, summed over its completions.

    `own` has the tokens of each, and those that are not generated yet; `left` those that are not
    generated after the step either, by index.
    """
    held = [length - rest for length, rest in own if rest < length]
    trained = [length for at, (length, _) in enumerate(own) if at not in left]
    return Counter(
        continued=len(held),
        held_tokens=sum(held),
        trained=len(trained),
        trained_tokens=sum(trained),
    )


@dataclass(frozen=True)
class SamplerWork:
    """The work of a sampler for the rollouts of a step; prefills are by prompt bucket."""

    mean: MeanWork
    prefills: Mapping[int, int]


def sampler_work(
    config: Config, lengths: Lengths, *, prompts: int, samples: int, cut_off: float | None = None
) -> SamplerWork:
    """The work of a sampler that gets its share of `samples` completions for each of `prompts`.

    With a cut-off and `rollout.partial = "keep"` it is a step after many others, which continues
    their rollouts. The configuration has sizes.
    """
    plan, rollout = config.plan, config.rollout
    shards, own_prompts = plan.sampler_shards, math.ceil(prompts / plan.num_samplers)
    count = max(1, own_prompts * samples)
    mean = mean_work(
        count,
        mean=lengths.completion,
        cap=rollout.max_new_tokens,
        sizes=tuple(size // shards for size in plan.slot_ladder),
        segment_steps=config.segment_steps,
        shards=shards,
        cut_off=cut_off,
        keeps=rollout.partial == "keep",
    )
    prefills = Counter[int]()
    continued = math.ceil(mean.continued)
    for tokens, number in ((0.0, own_prompts), (mean.held_tokens, continued)):
        bucket = config.prompt_bucket(round(min(lengths.prompt + tokens, rollout.max_tokens)))
        rows = config.prefill_rows(bucket)
        prefills[bucket] += math.ceil(math.ceil(number / shards) / rows)
    return SamplerWork(mean, {bucket: number for bucket, number in prefills.items() if number})


def training_work(config: Config, lengths: Lengths) -> SamplerWork:
    """The work of a sampler in a training step."""
    rollout = config.rollout
    return sampler_work(
        config,
        lengths,
        prompts=rollout.prompts_per_step,
        samples=rollout.group_size,
        cut_off=rollout.cut_off,
    )


def packed_positions(config: Config, lengths: Lengths, *, sequences: int) -> list[int]:
    """Positions of each micro-batch that the learner packs `sequences` into, over all devices.

    The last micro-batches are smaller.
    """
    row = config.row_tokens
    rows = max(1, math.ceil(sequences * Packing.expected(config, lengths).positions / row))
    shape = BatchShape(config.micro_batch_rows, config.plan.learner_shards, row, pad=0)
    return [size * row for size in shape.split(rows)]
