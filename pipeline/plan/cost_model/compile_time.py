"""Estimated time of compiling programs one after the other, tracing included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.contracts.model_shape import ModelShape
from pipeline.plan.cost_model.hardware import Chip
from pipeline.plan.cost_model.roofline import Seconds, fixed_time

_TPU_S = {
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
_CPU_S = {
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


def compile_s(
    names: Sequence[str],
    shape: ModelShape,
    *,
    chip: Chip,
    known: Mapping[str, float] | None = None,
) -> Seconds:
    """Seconds of compiling all programs. Cached programs take less, busy cores take longer.

    Args:
        names: names of programs, as in `built_programs`.
        shape: the model.
        chip: the target of compilation.
        known: measured seconds of some programs.
    """
    by_kind = _CPU_S if chip.platform == "cpu" else _TPU_S
    estimated = {name: by_kind[name.partition(" ")[0]] * shape.layers for name in names}
    measured = {name: known[name] for name in names if name in known} if known else {}
    return fixed_time(sum((estimated | measured).values()), chip=chip)
