"""Bounds on the difference between sampler and learner, with defaults by number format."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, Field

from configs.base import FREE, Table
from configs.model import Model
from configs.plan import Plan


@dataclass(frozen=True)
class MismatchBounds:
    """Bounds of |sampler's log-prob - learner's log-prob|.

    Attributes:
        probe: of the statistic of `pipeline.rollout.mismatch.probe_statistic` at the start.
        mean_stop: a step's mean above it ends the run.
        p999: a step's 99.9th percentile above it raises the alarm `disagreement`.
    """

    probe: float
    mean_stop: float
    p999: float


# docs/benchmarks.md has what rounding and planted faults reach. The probe is allowed 1.3 to 2
# times what 20 adapters reached by rounding, and less than one layer without its adapter reaches,
# except with int8_matmul, where rounding is as large. `mean_stop` and `p999` are at least 1.7 times
# what runs in bfloat16 reached, answers of two tokens, few of which are trained, included; those of
# int8 caches and int8_matmul are wider without such runs.
_BOUNDS = {
    "float32": MismatchBounds(probe=1e-3, mean_stop=1e-4, p999=1e-3),
    "bfloat16": MismatchBounds(probe=0.1, mean_stop=0.1, p999=1.5),
    'plan.rollout_weights = "int8"': MismatchBounds(probe=0.14, mean_stop=0.1, p999=1.5),
    'plan.kv_cache = "int8"': MismatchBounds(probe=0.2, mean_stop=0.15, p999=2.0),
    "int8_matmul": MismatchBounds(probe=0.75, mean_stop=0.2, p999=3.0),
}
"""By number format; of several the last one counts."""


def _defaults(name: str) -> str:
    """The default of a bound for each number format, for its description."""
    return ", ".join(f"{getattr(bounds, name):g} ({key})" for key, bounds in _BOUNDS.items())


class Mismatch(Table):
    """Bounds on |log-prob of the sampler - log-prob of the learner| for the same token.

    The defaults depend on the number format. The alarm `disagreement` reports large differences
    of single tokens.
    """

    model_config = ConfigDict(json_schema_extra=FREE)

    probe: float | None = Field(
        None,
        gt=0,
        description="bound of the probe at the start: the mean difference over 64 tokens, as a "
        f"share of what a random adapter changes. Default: {_defaults('probe')}",
    )
    mean_stop: float | None = Field(
        None,
        gt=0,
        description="a step's mean difference above this stops the run. Default: "
        f"{_defaults('mean_stop')}",
    )


def measured_bounds(model: Model, plan: Plan) -> MismatchBounds:
    """Default bounds of this base, these rollout weights and these caches."""
    applies = (
        True,
        model.dtype == "bfloat16",
        plan.rollout_weights == "int8",
        plan.kv_cache == "int8",
        "int8_matmul" in (plan.rollout_weights, model.quantization),
    )
    return [bounds for bounds, one in zip(_BOUNDS.values(), applies, strict=True) if one][-1]
