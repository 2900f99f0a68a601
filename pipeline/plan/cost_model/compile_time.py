"""How long compiling takes, before anything was compiled: tracing included, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.contracts.model_shape import ModelShape
from pipeline.plan.cost_model.hardware import Chip
from pipeline.plan.cost_model.timing import Seconds, fixed

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
"""Of a program for each layer of the model, by its kind, on two cores. A CPU's were measured,
on the demo's model alone."""


def compile_s(
    names: Sequence[str],
    shape: ModelShape,
    *,
    chip: Chip,
    known: Mapping[str, float] | None = None,
) -> Seconds:
    """Of all these programs. Less where the persistent cache has them, more where cores are busy.

    Args:
        names: of programs, as `built_programs` has them.
        shape: the model.
        chip: what they are compiled for.
        known: seconds of some that were compiled already.
    """
    by_kind = _CPU_S if chip.platform == "cpu" else _TPU_S
    estimated = {name: by_kind[name.partition(" ")[0]] * shape.layers for name in names}
    return fixed(sum((estimated | _of(names, known or {})).values()), chip=chip)


def _of(names: Sequence[str], known: Mapping[str, float]) -> dict[str, float]:
    return {name: known[name] for name in names if name in known}
