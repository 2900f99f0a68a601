"""The compiled programs of a run, and the time of compiling them.

For names see `pipeline.plan.program_names`.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import Config
from pipeline.data.batching import batch_shape
from pipeline.data.models.model_shape import ModelShape

_COMPILE_S_TPU = {
    "gradient": 2.0,
    "sft_gradient": 2.0,
    "segment": 1.2,
    "prefill": 0.8,
    "score": 0.8,
    "reference_top_k": 1.0,
    "apply": 0.3,
    "apply_sft": 0.3,
    "fill": 0.2,
    "compact": 0.05,
    "empty": 0.05,
}
_COMPILE_S_CPU = {
    "gradient": 1.05,
    "sft_gradient": 0.9,
    "segment": 0.38,
    "prefill": 0.2,
    "score": 0.32,
    "reference_top_k": 0.3,
    "apply": 0.28,
    "apply_sft": 0.28,
    "fill": 0.06,
    "compact": 0.015,
    "empty": 0.03,
}
"""Seconds per layer of the model, by kind of program, on two cores. Those of the CPU were measured
on the demo's model only."""


def programs_of(config: Config) -> tuple[str, ...]:
    """Programs that the TPU compiler can compile by name; `built_programs` lists all programs."""
    buckets, sizes = config.prompt_buckets, batch_shape(config, pad=0).sizes
    learner = ["score", "gradient"]
    learner += ["reference_top_k"] if config.learner.uses_reference_top_k else []
    learner += ["sft_gradient"] if config.run.has_sft_phase else []
    return (
        "empty",
        *(f"prefill {bucket}" for bucket in buckets),
        *(f"fill {bucket}" for bucket in buckets),
        *(f"segment {slots}" for slots in config.plan.slot_ladder),
        *(f"{kind} {rows}" for kind in learner for rows in sizes),
        "apply",
    )


def phase_programs(config: Config) -> dict[str, tuple[str, ...]]:
    """The programs of each phase of a step at its largest sizes, the largest program last."""
    rows, scoring = config.micro_batch_rows, ["score"]
    scoring += ["reference_top_k"] if config.learner.uses_reference_top_k else []
    return {
        "prefill": tuple(f"prefill {bucket}" for bucket in sorted(config.prompt_buckets)),
        "decode": (f"segment {config.slots}",),
        "score": tuple(f"{kind} {rows}" for kind in scoring),
        "update": (f"gradient {rows}",),
    }


def built_programs(config: Config, shape: ModelShape) -> tuple[str, ...]:
    """All programs that samplers and learner compile, by their names in `BuildLog`, once each.

    Merging and quantizing weights is not logged. Compaction is one program for the state outside of
    the caches, and one for each shape of ring cache.
    """
    longest = config.rollout.max_tokens
    rings = {
        (min(shape.window, longest) if shape.local[layer] else longest, shape.head_dim_of(layer))
        for layer in shape.kv_layers
    }
    named = ["empty slots" if name == "empty" else name for name in programs_of(config)]
    named += ["apply_sft"] if config.run.has_sft_phase else []
    for slots in config.plan.slot_ladder[1:]:
        named.append(f"compact {slots} slots")
        named += [
            f"compact {slots} rings of {shape.kv_heads}x{positions}x{head_dim}"
            for positions, head_dim in sorted(rings)
        ]
    return tuple(named)


def compile_s(names: Sequence[str], shape: ModelShape, *, platform: str) -> float:
    """Seconds of tracing and compiling `built_programs` one after the other, without caches."""
    by_kind = _COMPILE_S_CPU if platform == "cpu" else _COMPILE_S_TPU
    return sum(by_kind[name.partition(" ")[0]] for name in names) * shape.layers
