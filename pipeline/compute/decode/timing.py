"""Measures a sampler's compiled programs on their devices, after a warm-up run.

Timings include the host's part: a segment with the check for ended rollouts and the transfer of
their tokens, a fill with the transfer of the admissions. The sampled tokens are discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from configs.schema import Config
from pipeline.compute.decode.cache import Caches
from pipeline.compute.decode.programs import CompiledSampler
from pipeline.compute.decode.state import DecodeState, SamplingParams, SlotAdmissions
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import batch_shards, by_row, mesh_of
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.speeds import SamplerSpeed

REPEATS = 5
"""Timed runs of each program after a warm-up; the fastest counts, the others were delayed."""
_SLOTS_PER_ADMISSION = 8
"""One slot of this many is filled at a time."""


def sampler_speed(
    programs: CompiledSampler,
    weights: tuple[Params, Params],
    config: Config,
    vocabulary: Vocabulary,
) -> SamplerSpeed:
    """Times prefill, fill and segments with all slots busy, each at half of its positions.

    Holds the peak memory of sampling: the slots and one prefilled batch.

    Args:
        programs: compiled for the configuration's sizes.
        weights: base and adapter.
        config: with sizes.
        vocabulary: special token ids.
    """
    bench = _Bench(programs, weights, config, vocabulary, programs.empty())
    slots, prefill_s, fill_s = config.slots, dict[int, float](), dict[int, float]()
    for bucket in config.prompt_buckets:
        positions, read_s, one_fill_s = bench.prompts(bucket)
        prefill_s[positions] = read_s
        fill_s[slots] = max(fill_s.get(slots, 0.0), one_fill_s)
    segment_s = {size: bench.segment(size) for size in programs.segment}
    mesh = bench.mesh
    device = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    return SamplerSpeed(device, segment_s, prefill_s, fill_s)


@dataclass
class _Bench:
    """Runs the programs on one set of slots; attributes as the arguments of `sampler_speed`.

    Attributes:
        programs: see `sampler_speed`.
        weights: see `sampler_speed`.
        config: see `sampler_speed`.
        vocabulary: see `sampler_speed`.
        state: the slots.
    """

    programs: CompiledSampler
    weights: tuple[Params, Params]
    config: Config
    vocabulary: Vocabulary
    state: DecodeState

    @property
    def mesh(self) -> Mesh:
        sharding = self.state.length.sharding
        assert isinstance(sharding, NamedSharding)
        return mesh_of(sharding)

    def prompts(self, bucket: int) -> tuple[int, float, float]:
        """Positions of one prefill, its seconds, and the seconds of a fill."""
        place, shards = by_row(self.mesh), batch_shards(self.mesh)
        prompts = _prompts(self.config, self.vocabulary, bucket, shards)
        table = _admissions(self.config, self.vocabulary, bucket, shards)

        def read() -> Caches:
            inputs = jax.device_put(prompts, place)
            return jax.block_until_ready(self.programs.prefill[bucket](*self.weights, *inputs))

        caches = read()

        def fill() -> None:
            new = jax.device_put(table, place)
            self.state = self.programs.fill[bucket](self.state, caches, new)
            jax.block_until_ready(self.state)

        # `caches` stays allocated during the second prefill, as in sampling.
        return prompts[0].size, _fastest(read), _fastest(fill)

    def segment(self, slots: int) -> float:
        """Seconds of a segment; compacts the state to this number of slots."""
        place, shards = by_row(self.mesh), batch_shards(self.mesh)
        if slots != len(self.state.length):
            kept = np.tile(np.arange(slots // shards, dtype=np.int32), shards)
            self.state = self.programs.compact[slots](self.state, jax.device_put(kept, place))
        sampling, rollout = SamplingParams.of(1.0), self.config.rollout
        token = _plain_token(self.vocabulary)

        def put(value: Any) -> jax.Array:
            return jax.device_put(np.full(slots, value), place)

        def halfway() -> None:
            """Puts every slot at half of its positions, with no sampled token."""
            self.state = replace(
                self.state,
                last=put(np.int32(token)),
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

        return _fastest(turn, before=halfway)


def _fastest(work: Callable[[], Any], *, before: Callable[[], None] | None = None) -> float:
    seconds = []
    for _ in range(1 + REPEATS):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _plain_token(vocabulary: Vocabulary) -> int:
    """A token without a special meaning."""
    special = {vocabulary.pad, *vocabulary.stops, *vocabulary.forbidden}
    return next(token for token in range(len(special) + 1) if token not in special)


def _prompts(
    config: Config, vocabulary: Vocabulary, bucket: int, shards: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts that fill a bucket, and their lengths, as arguments of a prefill."""
    rows = shards * config.prefill_rows(bucket)
    prompts = np.full((rows, bucket), _plain_token(vocabulary), np.int32)
    return prompts, np.full(rows, bucket - 1, np.int32)


def _admissions(config: Config, vocabulary: Vocabulary, bucket: int, shards: int) -> np.ndarray:
    """A table that admits rollouts of the first prompts of each device to its first slots."""
    each = config.slots // shards
    count, read = max(1, each // _SLOTS_PER_ADMISSION), config.prefill_rows(bucket)
    table = SlotAdmissions.empty_table(config.slots)
    new = SlotAdmissions.of(table)
    for shard in range(shards):
        at = slice(shard * each, shard * each + count)
        new.slots[at], new.rows[at] = np.arange(count), np.arange(count) % read
        new.admitted[at], new.last[at] = True, _plain_token(vocabulary)
        new.length[at], new.limit[at] = bucket - 1, config.rollout.max_new_tokens
    return table
