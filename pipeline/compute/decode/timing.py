"""Times a sampler's compiled programs, the host's part included; sampled tokens are discarded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Config
from pipeline.compute.decode.cache import Caches
from pipeline.compute.decode.programs import CompiledSampler
from pipeline.compute.decode.state import DecodeState, SamplingParams, SlotAdmissions
from pipeline.compute.learner.timing import fastest_s
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import batch_shards, by_row
from pipeline.protocols import SamplerTimes


def sampler_times(
    programs: CompiledSampler,
    weights: tuple[Params, Params],
    config: Config,
    *,
    mesh: Mesh,
    token: int,
) -> SamplerTimes:
    """Times prefills, and segments with all slots busy, each at half of its positions.

    Holds the peak memory of sampling: the slots and one prefilled batch.

    Args:
        programs: compiled for the configuration's sizes.
        weights: base and adapter.
        config: with sizes.
        mesh: the devices.
        token: of which all prompts consist.
    """
    place, shards = by_row(mesh), batch_shards(mesh)
    sampling, rollout = SamplingParams.of(1.0), config.rollout
    state: DecodeState = programs.empty()

    def prefill_s(bucket: int) -> float:
        """Seconds of a prefill, and of filling the slots of its prompts."""
        rows = shards * config.prefill_rows(bucket)
        prompts = np.full((rows, bucket), token, np.int32)
        lengths = np.full(rows, bucket - 1, np.int32)
        table = _admissions(config, token, bucket, shards)
        caches: Caches | None = None

        def work() -> None:
            nonlocal state, caches
            inputs = jax.device_put((prompts, lengths), place)
            # The last ones stay allocated meanwhile, as in sampling.
            caches = programs.prefill[bucket](*weights, *inputs)
            state = programs.fill[bucket](state, caches, jax.device_put(table, place))
            jax.block_until_ready(state)

        return fastest_s(work)

    def segment_s(slots: int) -> float:
        """Seconds of a segment; compacts the state to this number of slots."""
        nonlocal state
        if slots != len(state.length):
            kept = np.tile(np.arange(slots // shards, dtype=np.int32), shards)
            state = programs.compact[slots](state, jax.device_put(kept, place))

        def put(value: Any) -> jax.Array:
            return jax.device_put(np.full(slots, value), place)

        def halfway() -> None:
            nonlocal state
            state = replace(
                state,
                last=put(np.int32(token)),
                length=put(np.int32(rollout.max_tokens // 2)),
                count=put(np.int32(0)),
                limit=put(np.int32(rollout.max_new_tokens)),
                done=put(np.bool_(0)),
            )
            jax.block_until_ready(state)

        def work() -> None:
            nonlocal state
            state = programs.segment[slots](*weights, state, sampling)
            np.array(state.done)
            jax.device_get((state.tokens, state.logprobs, state.processed_logprobs, state.count))

        return fastest_s(work, before=halfway)

    prefills = {bucket: prefill_s(bucket) for bucket in config.prompt_buckets}
    return SamplerTimes({slots: segment_s(slots) for slots in programs.segment}, prefills)


def _admissions(config: Config, token: int, bucket: int, shards: int) -> np.ndarray:
    """A table that admits rollouts of the prompts of each device to its first slots."""
    each, read = config.slots // shards, config.prefill_rows(bucket)
    count = min(each, read * config.rollout.group_size)
    table = SlotAdmissions.empty_table(config.slots)
    new = SlotAdmissions.of(table)
    for shard in range(shards):
        at = slice(shard * each, shard * each + count)
        new.slots[at], new.rows[at] = np.arange(count), np.arange(count) % read
        new.admitted[at], new.last[at] = True, token
        new.length[at], new.limit[at] = bucket - 1, config.rollout.max_new_tokens
    return table
