"""Warm segments of the small policy on the device that JAX finds: tokens a second, and memory."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from launch.bench.rollout_case import PROMPT, VOCABULARY, case_config, make_policy
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.decode.rollout_weights import RolloutWeights
from pipeline.compute.decode.state import DecodeState, SamplingParams
from pipeline.compute.model.sharding import build, by_row


def accelerator() -> dict[str, Any]:
    """Nothing where JAX finds an accelerator; else `absent`, which says so."""
    if jax.default_backend() == "cpu":
        return {"absent": "JAX finds a CPU only"}
    return {}


def segments(*, slots: int, length: int, repeats: int, **settings: Any) -> dict[str, Any]:
    """Figures of a segment in which every slot is busy, begun at half of its positions.

    Args:
        slots: rollouts that are decoded at once.
        length: positions of a prompt and its completion.
        repeats: segments after a first one, of which the median counts.
        settings: further ones, `table__key=value`.

    Returns:
        The device; MiB of the program's arguments, results and temporaries; milliseconds of a
        decode step and tokens a second.
    """
    assert repeats > 0
    config = case_config(
        rollout__max_new_tokens=length - PROMPT,
        plan__platform=jax.default_backend(),
        plan__slots=slots,
        plan__slot_buckets=[],
        plan__row_tokens=length,
        plan__micro_batch_tokens=length,
        **settings,
    )
    policy, base, adapter = make_policy(config)
    weights = RolloutWeights(policy, base, config)
    weights.load(adapter)
    programs = DecodePrograms(weights.policy, config, VOCABULARY)
    state = build(programs.trace_empty(), policy.mesh)()
    segment = build(programs.trace_segment(slots), policy.mesh)
    steps, sampling, seconds = config.segment_steps, SamplingParams.of(1.0), []
    for _ in range(1 + repeats):
        state = _halfway(programs, state)
        jax.block_until_ready(state)
        began = time.perf_counter()
        state = jax.block_until_ready(segment(weights.base, weights.adapter, state, sampling))
        seconds.append(time.perf_counter() - began)
        assert (np.asarray(state.count) == steps).all(), state.count
    step = statistics.median(seconds[1:]) / steps
    return {
        "device": policy.mesh.devices.flat[0].device_kind,
        "total_mib": _held(segment) / 2**20,
        "step_ms": 1e3 * step,
        "tokens_per_s": slots / step,
    }


def _halfway(programs: DecodePrograms, state: DecodeState) -> DecodeState:
    """Every slot with a rollout that has drawn nothing yet and has half of its positions behind."""
    rollout, slots = programs.config.rollout, len(state.length)

    def put(value: Any) -> jax.Array:
        return jax.device_put(np.full(slots, value), by_row(programs.policy.mesh))

    return replace(
        state,
        last=put(np.int32(max(VOCABULARY.forbidden) + 1)),
        length=put(np.int32(rollout.max_tokens // 2)),
        count=put(np.int32(0)),
        limit=put(np.int32(rollout.max_new_tokens)),
        done=put(np.bool_(0)),
    )


def _held(program: jax.stages.Compiled) -> int:
    """Bytes of arguments, temporaries and results that do not take an argument's place."""
    stats = program.memory_analysis()
    assert stats is not None
    size: int = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return size + stats.output_size_in_bytes - stats.alias_size_in_bytes
