"""The sizes that a search tries: slots with segments and prefills, micro-batches with remat.

More slots than a step has rollouts for, or more rows than it fills, buy nothing and are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import Config
from pipeline.contracts.speeds import Lengths
from pipeline.plan.cost_model.step import drawing, learning
from pipeline.plan.cost_model.timing import Pace
from pipeline.plan.cost_model.workload import packed_positions

LARGER = 1.25
"""A size and the next larger one that is tried."""
_MANY = 16
"""More slots than these are multiples of a quarter to an eighth of their number: devices compute
several at once, and so they do with the halves into which the last rollouts move."""
_SEGMENTS = (16, 32, 64)
_PREFILLS = (2048, 4096, 8192)
_REMATS = ("none", "dots", "full", "offload")


@dataclass(frozen=True)
class Option:
    """Some settings of a plan.

    Attributes:
        update: their values.
        seconds: what the phases that they are for take, as expected.
        changed: how many of them are not the configuration's.
        size: by which the memory grows: slots or positions on each shard.
    """

    update: Mapping[str, Any]
    seconds: float
    changed: int
    size: int


def slot_options(
    config: Config, pace: Pace, lengths: Lengths, *, most: int | None, free: bool
) -> list[Option]:
    """What drawing can be done with, the smallest last.

    Args:
        config: the placement; its own sizes are not read.
        pace: of the chips.
        lengths: that are expected.
        most: slots of a sampler, one on each shard at least; None: no bound.
        free: whether segment and prefill may be others than the configuration's.
    """
    plan, min_finished = config.plan, most_slots(config)
    prompts, samples = config.rollout.prompts_per_step, config.rollout.group_size
    bound = min_finished if most is None else min(min_finished, most // plan.sampler_shards)
    found = []
    for slots in ladder(bound):
        for segment, prefill in _reading(config, free=free):
            rows = slots * plan.sampler_shards
            update = {
                "slots": rows,
                "segment_steps": segment,
                "prefill_tokens": prefill,
                "slot_buckets": _below(rows, plan.slot_buckets),
            }
            tried = config.model_copy(update={"plan": plan.model_copy(update=update)})
            drawn = drawing(replace(pace, config=tried), lengths, prompts=prompts, samples=samples)
            seconds = (drawn.prefill + drawn.decode).expected
            changed = (segment != plan.segment_steps) + (prefill != plan.prefill_tokens)
            found.append(Option(update, seconds, changed, slots))
    return sorted(found, key=lambda option: -option.size)


def _below(rows: int, buckets: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if buckets is None else tuple(size for size in buckets if size < rows)


def most_slots(config: Config) -> int:
    """Slots of a shard for all its rollouts of a step at once: more buy nothing."""
    plan, rollout = config.plan, config.rollout
    share = math.ceil(rollout.prompts_per_step / plan.num_samplers) * rollout.group_size
    return math.ceil(share / plan.sampler_shards)


def most_rows(config: Config, lengths: Lengths) -> int:
    """Rows of a shard that a step fills: more buy nothing."""
    unit = config.row_tokens * config.plan.learner_shards
    update = {"micro_batch_tokens": unit}
    one = config.model_copy(update={"plan": config.plan.model_copy(update=update)})
    return len(packed_positions(one, lengths, sequences=config.rollout.size))


def _reading(config: Config, *, free: bool) -> Iterator[tuple[int, int]]:
    plan = config.plan
    segments = {plan.segment_steps, *(_SEGMENTS if free else ())}
    prefills = {plan.prefill_tokens, *(_PREFILLS if free else ())}
    most = config.rollout.max_new_tokens
    for segment in sorted(segments):
        if segment <= most or segment == plan.segment_steps:
            for prefill in sorted(prefills):
                yield segment, prefill


def row_options(
    config: Config, pace: Pace, lengths: Lengths, *, most: int | None, free: bool
) -> list[Option]:
    """What learning can be done with, the smallest last.

    Args:
        config: the placement; its own sizes are not read.
        pace: of the chips.
        lengths: that are expected.
        most: positions of a micro-batch, a row on each shard at least; None: no bound.
        free: whether remat may be another than the configuration's.
    """
    plan, min_finished = config.plan, most_rows(config, lengths)
    unit = config.row_tokens * plan.learner_shards
    bound = min_finished if most is None else min(min_finished, most // unit)
    remats = {plan.remat, *(_REMATS if free else ())}
    if plan.platform == "cpu":
        remats -= {"offload"} - {plan.remat}
    found = []
    for rows in ladder(bound, tiled=False):
        for remat in sorted(remats):
            update = {"micro_batch_tokens": rows * unit, "remat": remat}
            tried = config.model_copy(update={"plan": plan.model_copy(update=update)})
            seconds = learning(replace(pace, config=tried), lengths)
            total = (seconds["score"] + seconds["update"]).expected
            found.append(Option(update, total, int(remat != plan.remat), rows))
    return sorted(found, key=lambda option: -option.size)


def ladder(most: int, *, tiled: bool = True) -> list[int]:
    """Sizes up to and with `most`, each about `LARGER` times the one before; none below 1."""
    found: list[int] = []
    size = 1
    while size < most:
        found.append(size)
        size = larger(size, tiled=tiled)
    return [*found, most] if most >= 1 else []


def larger(size: int, *, tiled: bool = True) -> int:
    """The next larger size that is tried; with `tiled` one that suits slots."""
    found = max(size + 1, math.floor(LARGER * size))
    if found <= _MANY or not tiled:
        return found
    unit = 1 << (found.bit_length() - 3)
    return (2 * found + unit - 1) // (2 * unit) * unit
