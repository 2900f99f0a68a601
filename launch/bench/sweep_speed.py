"""Speed and memory of warm segments of the small policy on the device that JAX finds."""

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
    """Returns nothing if JAX finds an accelerator; otherwise `absent` with the reason."""
    if jax.default_backend() == "cpu":
        return {"absent": "JAX finds a CPU only"}
    return {}


def segments(*, slots: int, length: int, repeats: int, **settings: Any) -> dict[str, Any]:
    """Returns figures of a segment with all slots busy, starting at half of their positions.

    Args:
        slots: rollouts decoded at once.
        length: positions of a prompt and its completion.
        repeats: segments after a first one; the median counts.
        settings: further settings, `table__key=value`.

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
    """Sets every slot to a rollout at half of its positions, without new tokens yet."""
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
    """Returns bytes of arguments, temporaries, and results that alias no argument."""
    stats = program.memory_analysis()
    assert stats is not None
    size: int = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return size + stats.output_size_in_bytes - stats.alias_size_in_bytes
