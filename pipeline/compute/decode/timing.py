"""How long a sampler's compiled programs take on the devices that they are for, warm.

What is timed ends on the host: a segment with the look at what has ended and taking it, newcomers
with handing them over. What is drawn means nothing and is thrown away.
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
from pipeline.compute.decode.compiled import Compiled
from pipeline.compute.decode.state import DecodeState, Heat, Newcomers
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import batch_shards, by_row, mesh_of
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.speeds import SamplerSpeed

REPEATS = 5
"""Of each program, after a first run; the fastest counts: the others waited for something else."""
_NEWCOMERS = 8
"""One slot of so many is given to a newcomer at a time."""


def sampler_speed(
    programs: Compiled,
    weights: tuple[Params, Params],
    config: Config,
    vocabulary: Vocabulary,
) -> SamplerSpeed:
    """Times everything that drawing consists of, in all slots, each at half of its positions.

    Holds what drawing holds at its fullest: the slots, and prompts that were read.

    Args:
        programs: of the configuration's sizes.
        weights: base and adapter.
        config: with sizes.
        vocabulary: token ids with a meaning.
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
    """The slots, from which programs take what they are given, and what else is needed.

    Attributes:
        programs: see `sampler_speed`; and so on.
        state: the slots.
    """

    programs: Compiled
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
        """Positions that are read at once, seconds of reading them, and of filling slots."""
        place, shards = by_row(self.mesh), batch_shards(self.mesh)
        prompts = _prompts(self.config, self.vocabulary, bucket, shards)
        table = _newcomers(self.config, self.vocabulary, bucket, shards)

        def read() -> Caches:
            inputs = jax.device_put(prompts, place)
            return jax.block_until_ready(self.programs.prefill[bucket](*self.weights, *inputs))

        caches = read()

        def fill() -> None:
            new = jax.device_put(table, place)
            self.state = self.programs.fill[bucket](self.state, caches, new)
            jax.block_until_ready(self.state)

        # A second prefill beside the first one, as while drawing.
        return prompts[0].size, _fastest(read), _fastest(fill)

    def segment(self, slots: int) -> float:
        """Seconds of a segment; the slots are as many from now on."""
        place, shards = by_row(self.mesh), batch_shards(self.mesh)
        if slots != len(self.state.length):
            kept = np.tile(np.arange(slots // shards, dtype=np.int32), shards)
            self.state = self.programs.compact[slots](self.state, jax.device_put(kept, place))
        heat, rollout, token = Heat.of(1.0), self.config.rollout, _token(self.vocabulary)

        def put(value: Any) -> jax.Array:
            return jax.device_put(np.full(slots, value), place)

        def halfway() -> None:
            """Every slot with a rollout that has half of its positions behind, none drawn."""
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
            state = self.state = self.programs.segment[slots](*self.weights, self.state, heat)
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


def _token(vocabulary: Vocabulary) -> int:
    """One that may be drawn and ends nothing."""
    barred = {vocabulary.pad, *vocabulary.stops, *vocabulary.forbidden}
    return next(token for token in range(len(barred) + 1) if token not in barred)


def _prompts(
    config: Config, vocabulary: Vocabulary, bucket: int, shards: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts that fill a bucket, and their lengths as a prefill takes them."""
    rows = shards * config.prefill_rows(bucket)
    prompts = np.full((rows, bucket), _token(vocabulary), np.int32)
    return prompts, np.full(rows, bucket - 1, np.int32)


def _newcomers(
    config: Config, vocabulary: Vocabulary, bucket: int, shards: int
) -> Newcomers[np.ndarray]:
    """The first slots of each device are given to rollouts of its first prompts."""
    each = config.slots // shards
    count, read = max(1, each // _NEWCOMERS), config.prefill_rows(bucket)
    new = Newcomers.none(config.slots)
    for shard in range(shards):
        at = slice(shard * each, shard * each + count)
        new.slots[at], new.rows[at] = np.arange(count), np.arange(count) % read
        new.arrived[at], new.last[at] = True, _token(vocabulary)
        new.length[at], new.limit[at] = bucket - 1, config.rollout.max_new_tokens
    return new
