"""Memory of our sampler on a v5e chip by the TPU compiler: its programs and all other arrays.

Beside the arguments of a running program the chip holds base and adapter, the slots, and the caches
of prefilled prompts that wait for a slot.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from launch.bench.models import MODELS, VOCAB, bench_config, own_sizes
from launch.bench.whole_logits import whole_logits
from pipeline.compute.aot.compile import (
    VOCABULARY,
    DoesNotFitError,
    Program,
    compile_for,
    v5e_devices,
)
from pipeline.compute.aot.estimated_time import estimated_seconds
from pipeline.compute.aot.hlo import parse
from pipeline.compute.decode.cache import bytes_per_row
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.decode.rollout_weights import rollout_policy
from pipeline.compute.model.architecture import Architecture, architecture
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.sharding import make_mesh, placed
from pipeline.contracts.topology import GIB, HBM_GIB


def sampler(
    *, model: str, slots: int, length: int, devices: int = 1, **settings: Any
) -> dict[str, Any]:
    """Returns figures of a sampler with `slots` slots on each chip: prefill, fill and decoding.

    Compaction is left out: it needs a small copy of one layer's slots, less than the segment's
    temporaries.

    Args:
        model: key of `MODELS`.
        slots: on each chip.
        length: positions of a prompt and its completion.
        devices: chips.
        settings: further settings, `table__key=value`.

    Returns:
        `fits`. If False, `needs_gib` by the compiler. If True, the figures of `decoding`, the peak
        over all programs in GiB, and the rest of the chip.
    """
    programs = _programs(model, slots=slots, length=length, devices=devices, settings=settings)
    bucket = max(programs.config.prompt_buckets)
    try:
        empty, segment, prefill, fill = (
            compile_for(traced)
            for traced in (
                programs.trace_empty(),
                programs.trace_segment(slots * devices),
                programs.trace_prefill(bucket),
                programs.trace_fill(bucket),
            )
        )
    except DoesNotFitError as error:
        return {"fits": False, "needs_gib": error.needs_gib}
    state, waiting, copied = _results(empty), _results(prefill), _copied(programs)
    weights = segment.stats.argument_size_in_bytes - state
    # Prompt caches wait while slots decode; with several devices, also during another's prefill.
    moments = {
        "segment": segment.hbm_bytes + copied + waiting,
        "prefill": prefill.hbm_bytes + copied + state + (waiting if devices > 1 else 0),
        "fill": fill.hbm_bytes + copied + weights,
    }
    fullest = max(moments.values()) / GIB
    return {
        "fits": fullest <= HBM_GIB,
        "needs_gib": fullest,
        "weights_gib": (weights + copied) / GIB,
        "state_gib": state / GIB,
        **{f"{name}_gib": size / GIB for name, size in moments.items()},
        "spare_gib": HBM_GIB - fullest,
        **_decoding(model, programs, segment, slots=slots),
    }


def decoding(
    *, model: str, slots: int, length: int, devices: int = 1, **settings: Any
) -> dict[str, Any]:
    """Returns figures of the segment alone; arguments as for `sampler`.

    Returns:
        `fits`. If False, `needs_gib` by the compiler. If True, GiB of the program, of the learner's
        matrices if the sampler has its own copy, and of both; estimated milliseconds of a decode
        step and the resulting tokens a second on each chip; a sequence's KV bytes as a share of
        dense caches; the buffers that violate invariant 3.
    """
    programs = _programs(model, slots=slots, length=length, devices=devices, settings=settings)
    try:
        segment = compile_for(programs.trace_segment(slots * devices))
    except DoesNotFitError as error:
        return {"fits": False, "needs_gib": error.needs_gib}
    gib = (segment.hbm_bytes + _copied(programs)) / GIB
    found = {"fits": gib <= HBM_GIB, "needs_gib": gib}
    return found | _decoding(model, programs, segment, slots=slots)


def _decoding(
    model: str, programs: DecodePrograms, segment: Program, *, slots: int
) -> dict[str, Any]:
    config, shape = programs.config, programs.policy.architecture
    module = parse(segment.text)
    step = estimated_seconds(module) / config.segment_steps
    vocab = VOCAB // (config.plan.fsdp * config.plan.tp)
    large = whole_logits(module, vocab=vocab, model=own_sizes(model))
    length = config.rollout.max_tokens
    rings = bytes_per_row(shape, max_tokens=length, eight_bits=config.plan.kv_cache == "int8")
    program, copied = segment.hbm_bytes / GIB, _copied(programs) / GIB
    return {
        "segment_program_gib": program,
        "copied_gib": copied,
        "total_gib": program + copied,
        "step_ms": 1e3 * step,
        "tokens_per_s": slots / step,
        "kv_share": rings / _dense_bytes(shape, length),
        "kv_mb": rings / 1e6,
        "invariant_3": not large,
        "large_buffers": sorted({f"{b.shape.dtype}{list(b.shape.dims)}" for b in large}),
    }


def _results(program: Program) -> int:
    size: int = program.stats.output_size_in_bytes
    return size


def _copied(programs: DecodePrograms) -> int:
    """Returns bytes a chip of the learner's matrices, if the sampler has its own copy of them."""
    if programs.config.plan.rollout_weights == "shared":
        return 0
    policy = programs.policy
    return sum(
        math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
        for name, shape in placed(policy.plain_shapes, policy.mesh).items()
        if name.startswith("layers.") and shape.ndim > 1
    )


def _dense_bytes(shape: Architecture, length: int) -> int:
    """Returns bytes of a sequence with keys and values of every layer and position."""
    config = shape.config
    per_position = (
        2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.param_dtype).itemsize
    )
    return config.num_layers * length * per_position


def _programs(
    model: str, *, slots: int, length: int, devices: int, settings: dict[str, Any]
) -> DecodePrograms:
    config = bench_config(
        model,
        length=length,
        plan__learner_devices=devices,
        plan__micro_batch_tokens=length * devices,
        plan__slots=slots * devices,
        plan__slot_buckets=[],
        **settings,
    )
    mesh = make_mesh(v5e_devices(devices), fsdp=config.plan.fsdp, tp=config.plan.tp)
    policy = Policy(
        architecture(MODELS[model], dtype=jnp.dtype("bfloat16")), lora=config.lora, mesh=mesh
    )
    return DecodePrograms(rollout_policy(policy, config), config, VOCABULARY)
