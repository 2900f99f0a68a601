"""Measures a sampler's compiled programs on their devices, after a warm-up run.

Timings include the host's part: a segment with the check for ended rollouts and the transfer of
their tokens, a fill with the transfer of the admissions. The sampled tokens are discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Config
from pipeline.compute.decode.cache import Caches
from pipeline.compute.decode.programs import CompiledSampler
from pipeline.compute.decode.state import DecodeState, SamplingParams, SlotAdmissions
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import batch_shards, by_row
from pipeline.compute.model.timing import device_name, fastest_s, plain_token
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.speeds import Speeds

REPEATS = 5
"""Timed runs of each program after a warm-up."""
_SLOTS_PER_ADMISSION = 8
"""One slot of this many is filled at a time."""


def sampler_speed(
    programs: CompiledSampler,
    weights: tuple[Params, Params],
    config: Config,
    *,
    mesh: Mesh,
    vocabulary: Vocabulary,
) -> Speeds:
    """Times prefill, fill and segments with all slots busy, each at half of its positions.

    Holds the peak memory of sampling: the slots and one prefilled batch.

    Args:
        programs: compiled for the configuration's sizes.
        weights: base and adapter.
        config: with sizes.
        mesh: the devices.
        vocabulary: special token ids.
    """
    bench = _Bench(programs, weights, config, mesh, plain_token(vocabulary), programs.empty())
    slots, prefill_s, fill_s = config.slots, dict[int, float](), dict[int, float]()
    for bucket in config.prompt_buckets:
        positions, read_s, one_fill_s = bench.prompts(bucket)
        prefill_s[positions] = read_s
        fill_s[slots] = max(fill_s.get(slots, 0.0), one_fill_s)
    segment_s = {size: bench.segment(size) for size in programs.segment}
    return Speeds(device_name(mesh), segment_s, prefill_s, fill_s)


@dataclass
class _Bench:
    """Runs the programs of `sampler_speed` on one set of slots, with one token everywhere."""

    programs: CompiledSampler
    weights: tuple[Params, Params]
    config: Config
    mesh: Mesh
    token: int
    state: DecodeState

    def prompts(self, bucket: int) -> tuple[int, float, float]:
        """Positions of one prefill, its seconds, and the seconds of a fill."""
        place, shards = by_row(self.mesh), batch_shards(self.mesh)
        rows = shards * self.config.prefill_rows(bucket)
        prompts = np.full((rows, bucket), self.token, np.int32)
        lengths = np.full(rows, bucket - 1, np.int32)
        table = _admissions(self.config, self.token, bucket, shards)

        def read() -> Caches:
            inputs = jax.device_put((prompts, lengths), place)
            return jax.block_until_ready(self.programs.prefill[bucket](*self.weights, *inputs))

        caches = read()

        def fill() -> None:
            new = jax.device_put(table, place)
            self.state = self.programs.fill[bucket](self.state, caches, new)
            jax.block_until_ready(self.state)

        # `caches` stays allocated during the second prefill, as in sampling.
        read_s, fill_s = (fastest_s(work, repeats=REPEATS) for work in (read, fill))
        return prompts.size, read_s, fill_s

    def segment(self, slots: int) -> float:
        """Seconds of a segment; compacts the state to this number of slots."""
        place, shards = by_row(self.mesh), batch_shards(self.mesh)
        if slots != len(self.state.length):
            kept = np.tile(np.arange(slots // shards, dtype=np.int32), shards)
            self.state = self.programs.compact[slots](self.state, jax.device_put(kept, place))
        sampling, rollout = SamplingParams.of(1.0), self.config.rollout

        def put(value: Any) -> jax.Array:
            return jax.device_put(np.full(slots, value), place)

        def halfway() -> None:
            """Puts every slot at half of its positions, with no sampled token."""
            self.state = replace(
                self.state,
                last=put(np.int32(self.token)),
                length=put(np.int32(rollout.max_tokens // 2)),
                count=put(np.int32(0)),
                limit=put(np.int32(rollout.max_new_tokens)),
                done=put(np.bool_(0)),
            )
            jax.block_until_ready(self.state)

        def turn() -> None:
            state = self.state = self.programs.segment[slots](*self.weights, self.state, sampling)
            np.array(state.done)
            jax.device_get((state.tokens, state.logprobs, state.processed_logprobs, state.count))

        return fastest_s(turn, repeats=REPEATS, before=halfway)


def _admissions(config: Config, token: int, bucket: int, shards: int) -> np.ndarray:
    """A table that admits rollouts of the first prompts of each device to its first slots."""
    each = config.slots // shards
    count, read = max(1, each // _SLOTS_PER_ADMISSION), config.prefill_rows(bucket)
    table = SlotAdmissions.empty_table(config.slots)
    new = SlotAdmissions.of(table)
    for shard in range(shards):
        at = slice(shard * each, shard * each + count)
        new.slots[at], new.rows[at] = np.arange(count), np.arange(count) % read
        new.admitted[at], new.last[at] = True, token
        new.length[at], new.limit[at] = bucket - 1, config.rollout.max_new_tokens
    return table
