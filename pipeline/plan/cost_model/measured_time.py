"""Seconds of a step from measured program times.

Interpolates linearly between measured sizes. Below the smallest its seconds count; above the
largest seconds grow in proportion to the size.
"""

from __future__ import annotations

import math
from itertools import pairwise

from configs.schema import Config
from pipeline.contracts.speeds import Lengths, Speeds, Table
from pipeline.plan.cost_model.workload import expected_schedule, packed_positions


def sampling_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds of generating a step's rollouts, by the decode schedule of a sampler.

    Args:
        config: the run, with sizes.
        speeds: measured times of at least one number of slots.
        lengths: expected lengths.
    """
    plan, rollout = config.plan, config.rollout
    shards, samples = plan.sampler_shards, rollout.group_size
    prompts = math.ceil(rollout.prompts_per_step / plan.num_samplers)
    schedule = expected_schedule(
        prompts * samples,
        mean=lengths.completion,
        cap=rollout.max_new_tokens,
        sizes=tuple(slots // shards for slots in plan.slot_ladder),
        segment_steps=config.segment_steps,
        shards=shards,
    )
    decode = sum(
        number * seconds_at(speeds.segment_s, slots * shards)
        for slots, number in schedule.segments.items()
    )
    fill = schedule.fills * seconds_at(speeds.fill_s, config.slots)
    bucket = config.prompt_bucket(min(round(lengths.prompt), rollout.max_prompt_tokens))
    rows = config.prefill_rows(bucket)
    prefills = math.ceil(math.ceil(prompts / shards) / rows)
    return decode + fill + prefills * seconds_at(speeds.prefill_s, rows * bucket * shards)


def learning_s(config: Config, speeds: Speeds, lengths: Lengths) -> float:
    """Seconds of training on a step's rollouts, without applying the update.

    Args:
        config: the run, with sizes.
        speeds: measured times of at least one micro-batch size.
        lengths: expected lengths.
    """
    batches = packed_positions(config, lengths, sequences=config.rollout.size)
    rows = (positions // config.row_tokens for positions in batches)
    one_pass = sum(seconds_at(speeds.micro_batch_s, number) for number in rows)
    return one_pass * config.learner.updates_per_batch


def seconds_at(table: Table, size: int) -> float:
    """Seconds of a size, interpolated from a table that is not empty."""
    sizes = sorted(table)
    if size <= sizes[0]:
        return table[sizes[0]]
    if size >= sizes[-1]:
        return table[sizes[-1]] * size / sizes[-1]
    low, high = next((a, b) for a, b in pairwise(sizes) if a <= size <= b)
    share = (size - low) / (high - low)
    return (1 - share) * table[low] + share * table[high]
