"""Estimated memory of a chip in the fullest moment of each phase of a step. No JAX.

While a program runs, its chip also holds what is not part of the program: the optimizer state, the
caches of rollouts, a copy of the weights for rollouts. This module adds both.
"""

from __future__ import annotations

from collections.abc import Collection

from configs.schema import Config
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.cost_model.program_memory import (
    MemoryParts,
    ProcessArrays,
    program_memory,
    slots_memory,
)
from pipeline.plan.cost_model.programs import phase_programs
from pipeline.plan.program_names import SAMPLER, split_name

PARTS = (
    "base",
    "adapter",
    "optimizer",
    "kv_local",
    "kv_global",
    "activations",
    "head",
    "temporaries",
)
"""Parts of the memory in the order of the report. `base` includes a copy for rollouts, if there is
one; `adapter` all adapters on the chip; `optimizer` the gradients."""
PHASES = ("prefill", "decode", "score", "update")
"""Phases of a step with programs of their own."""


def estimate_memory(
    config: Config, shape: ModelShape, *, phases: Collection[str] = PHASES
) -> dict[str, MemoryParts]:
    """Memory of each phase in its fullest moment, on a chip of the process that runs it.

    Returns:
        Bytes by part, by phase; in colocated placement one process runs all of them in turn.
    """
    return {
        phase: max(
            (memory_during(config, shape, program) for program in names),
            key=lambda parts: parts.total(),
        )
        for phase, names in phase_programs(config).items()
        if phase in phases
    }


def memory_during(config: Config, shape: ModelShape, program: str) -> MemoryParts:
    """Memory of a chip while a program runs on it, by part."""
    return program_memory(config, shape, program) + memory_beside(config, shape, program)


def memory_beside(config: Config, shape: ModelShape, program: str) -> MemoryParts:
    """Memory of a chip while a program runs, without the program's arguments and results.

    These bytes are exact: added to the compiler's report on the program they give the memory in
    use on the chip.
    """
    arrays = ProcessArrays.of(config, shape, program)
    kind, colocated = split_name(program)[0], config.plan.placement != "split"
    on_sampler = kind in SAMPLER
    parts = MemoryParts()
    if colocated or not on_sampler:
        # Adam's moments, unless they are arguments, and the learner's adapters that are not.
        parts["optimizer"] += 0 if kind == "apply" else 2 * arrays.adapter
        parts["adapter"] += (1 + _further_adapters(config)) * arrays.adapter
    if on_sampler and not arrays.adapted:
        parts["adapter"] += arrays.adapter
    if colocated or on_sampler:
        parts["base"] += _weight_copy(config, shape, arrays, on_sampler=on_sampler)
    if kind in {"prefill", "segment"}:
        parts += _caches_beside(arrays, kind)
    if kind == "prefill":
        parts += arrays.unread
    if kind in {"empty", "fill"}:
        parts["base"] += arrays.base
        parts["adapter"] += arrays.adapter if arrays.adapted else 0
    return parts


def _further_adapters(config: Config) -> int:
    """Number of the teacher's and the KL reference's adapters; the base alone needs none."""
    moved = config.run.has_sft_phase or config.lora.start is not None
    reference = config.learner.kl_coef > 0 and moved
    return int(reference) + int(config.learner.teacher is not None)


def _weight_copy(
    config: Config, shape: ModelShape, arrays: ProcessArrays, *, on_sampler: bool
) -> int:
    """Bytes of the layers' second copy, which rollouts use in another form.

    While the sampler uses its copy, the learner's is the other one, and vice versa. A sampler in a
    process of its own quantizes weights while it loads them; only merging keeps the originals.
    """
    kind = config.plan.rollout_weights
    if kind == "shared" or (config.plan.placement == "split" and kind != "merged"):
        return 0
    quantization = "none" if on_sampler or kind == "merged" else kind
    devices = arrays.devices
    return shape.layers_bytes(
        config.model.dtype, quantization=quantization, fsdp=devices.fsdp, tp=devices.tp
    )


def _caches_beside(arrays: ProcessArrays, kind: str) -> MemoryParts:
    """Memory of the slots, and of prefilled prompts that wait for one.

    The caches of a prompt wait while other slots decode; with several devices, those of one also
    wait while another prefills.
    """
    config, parts = arrays.config, MemoryParts()
    if kind == "prefill":
        parts += slots_memory(arrays, config.slots)
    if kind == "segment" or arrays.devices.count > 1:
        bucket = max(config.prompt_buckets)
        parts += arrays.caches(config.prefill_rows(bucket), bucket)
    return parts
