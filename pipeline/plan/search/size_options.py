"""Sizes that the planner tries: slots with segment and prefill sizes, micro-batches with remat.

Slots beyond the rollouts of a step, and rows beyond those that a step fills, are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from configs.schema import Config
from pipeline.plan.cost_model.roofline import RooflineModel
from pipeline.plan.cost_model.step import estimate_learning, sampling_seconds
from pipeline.plan.cost_model.workload import packed_positions, training_work
from pipeline.plan.lengths import Lengths
from pipeline.plan.sizes import with_plan

GROWTH = 1.25
"""Ratio of a size that is tried to the next smaller one."""
_UNALIGNED_SLOTS = 16
"""Larger numbers of slots are multiples of a quarter to an eighth of their power of two: devices
compute several slots at once, also in the smaller buckets into which the last rollouts move."""
_SEGMENTS = {16, 32, 64}
_PREFILLS = {2048, 4096, 8192}
_REMATS = ("none", "dots", "full", "offload")


@dataclass(frozen=True)
class SizeOption:
    """Settings of a plan to try, and the expected seconds of the phases that they affect.

    `changed` of them differ from the configuration's; memory grows with `size`.
    """

    update: Mapping[str, Any]
    seconds: float
    changed: int
    size: int


def slot_options(
    model: RooflineModel, lengths: Lengths, *, free: Collection[str]
) -> list[SizeOption]:
    """Options for generating rollouts, the smallest last; given slots are kept.

    Other values than the configuration's are tried of settings that are `free`.
    """
    config, plan = model.config, model.config.plan
    sizes = sizes_up_to(max_useful_slots(config))
    if plan.slots is not None:
        sizes = [plan.slots // plan.sampler_shards]
    segments, prefills = {plan.segment_steps}, {plan.prefill_tokens}
    if "segment_steps" in free:
        segments |= {steps for steps in _SEGMENTS if steps <= config.rollout.max_new_tokens}
    if "prefill_tokens" in free:
        prefills |= _PREFILLS
    found = []
    for slots_per_shard, segment, prefill in product(sizes, sorted(segments), sorted(prefills)):
        update = {
            "slots": slots_per_shard * plan.sampler_shards,
            "segment_steps": segment,
            "prefill_tokens": prefill,
        }
        tried = with_plan(config, update)
        sampling = sampling_seconds(replace(model, config=tried), training_work(tried, lengths))
        seconds = (sampling["prefill"] + sampling["decode"]).expected
        changed = (segment != plan.segment_steps) + (prefill != plan.prefill_tokens)
        found.append(SizeOption(update, seconds, changed, slots_per_shard))
    return sorted(found, key=lambda option: -option.size)


def max_useful_slots(config: Config) -> int:
    """Slots of a shard that hold all its rollouts of a step at once."""
    plan, rollout = config.plan, config.rollout
    share = math.ceil(rollout.prompts_per_step / plan.num_samplers) * rollout.group_size
    return math.ceil(share / plan.sampler_shards)


def max_useful_rows(config: Config, lengths: Lengths) -> int:
    """Packed rows of a shard that hold all its sequences of a step at once."""
    unit = config.row_tokens * config.plan.learner_shards
    smallest = with_plan(config, {"micro_batch_tokens": unit})
    return len(packed_positions(smallest, lengths, sequences=config.rollout.size))


def row_options(
    model: RooflineModel, lengths: Lengths, *, free: Collection[str]
) -> list[SizeOption]:
    """Options for learning, the smallest last; see `slot_options`."""
    config, plan = model.config, model.config.plan
    unit = config.row_tokens * plan.learner_shards
    sizes = sizes_up_to(max_useful_rows(config, lengths), aligned=False)
    if plan.micro_batch_tokens is not None:
        sizes = [plan.micro_batch_tokens // unit]
    remats = {plan.remat, *(_REMATS if "remat" in free else ())}
    if plan.platform == "cpu":
        remats -= {"offload"} - {plan.remat}
    found = []
    for rows in sizes:
        for remat in sorted(remats):
            update = {"micro_batch_tokens": rows * unit, "remat": remat}
            tried = with_plan(config, update)
            seconds = estimate_learning(
                replace(model, config=tried), lengths, sequences=config.rollout.size
            )
            total = (seconds["score"] + seconds["update"]).expected
            found.append(SizeOption(update, total, int(remat != plan.remat), rows))
    return sorted(found, key=lambda option: -option.size)


def sizes_up_to(largest: int, *, aligned: bool = True) -> list[int]:
    """Increasing sizes up to and including `largest`, each about `GROWTH` times the one before.

    With `aligned` they are numbers of slots that devices compute well.
    """
    found, size = list[int](), 1
    while size < largest:
        found.append(size)
        size = max(size + 1, math.floor(GROWTH * size))
        if aligned and size > _UNALIGNED_SLOTS:
            unit = 1 << (size.bit_length() - 3)
            size = (2 * size + unit - 1) // (2 * unit) * unit
    return [*found, largest]
