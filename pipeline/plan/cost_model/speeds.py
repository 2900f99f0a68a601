"""Seconds of a step at measured speeds.

Interpolates linearly between measured sizes and never extrapolates below the nearest one.
"""

from __future__ import annotations

import math
from itertools import pairwise

from configs.schema import Config
from pipeline.contracts.speeds import Lengths, Speeds, Table
from pipeline.plan.cost_model.workload import expected_turns, packed_positions


def sampling_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds in which a step's rollouts are drawn, by the schedule of a sampler's slots.

    Args:
        config: with sizes.
        speeds: at least one number of slots was measured.
        lengths: that are expected.
    """
    plan, rollout = config.plan, config.rollout
    shards, samples = plan.sampler_shards, rollout.group_size
    prompts = math.ceil(rollout.prompts_per_step / plan.num_samplers)
    turns = expected_turns(
        prompts * samples,
        mean=lengths.completion,
        cap=rollout.max_new_tokens,
        sizes=tuple(slots // shards for slots in plan.slot_ladder),
        segment_steps=config.segment_steps,
        shards=shards,
    )
    decode = sum(
        number * seconds_at(speeds.segment_s, slots * shards)
        for slots, number in turns.segments.items()
    )
    fill = turns.fills * seconds_at(speeds.fill_s, config.slots)
    bucket = config.prompt_bucket(min(round(lengths.prompt), rollout.max_prompt_tokens))
    rows = config.prefill_rows(bucket)
    reads = math.ceil(math.ceil(prompts / shards) / rows)
    return decode + fill + reads * seconds_at(speeds.prefill_s, rows * bucket * shards)


def learning_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds in which a step's rollouts are learned from, but for applying the update.

    Args:
        config: with sizes.
        speeds: at least one micro-batch was measured.
        lengths: that are expected.
    """
    batches = packed_positions(config, lengths, sequences=config.rollout.size)
    rows = (positions // config.row_tokens for positions in batches)
    once = sum(seconds_at(speeds.micro_batch_s, number) for number in rows)
    return once * config.learner.updates_per_batch


def seconds_at(table: Table, size: int) -> float:
    """Seconds of a size, by those that were measured; there must be one."""
    sizes = sorted(table)
    if size <= sizes[0]:
        return table[sizes[0]]
    if size >= sizes[-1]:
        return table[sizes[-1]] * size / sizes[-1]
    low, high = next((a, b) for a, b in pairwise(sizes) if a <= size <= b)
    share = (size - low) / (high - low)
    return (1 - share) * table[low] + share * table[high]
