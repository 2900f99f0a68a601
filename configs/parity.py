"""Bounds on the difference between sampler and learner, with defaults by number format."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from configs.base import Table
from configs.model import Model
from configs.plan import Plan


class Parity(Table):
    """Bounds on |log-prob of the sampler - log-prob of the learner| for the same token.

    The defaults depend on the number format; docs/benchmarks.md has their measurement. Rule
    `alarms.disagreement` reports large differences of single tokens.
    """

    probe: float | None = Field(
        None,
        gt=0,
        description="bound of the probe at the start: the mean difference over 64 tokens, as a "
        "share of what a random adapter changes. Default: 0.001 (float32), 0.1 (bfloat16), 0.14 "
        '(plan.rollout_weights = "int8"), 0.2 (plan.kv_cache = "int8"), 0.75 (int8_matmul)',
    )
    mean_stop: float | None = Field(
        None,
        gt=0,
        description="a step's mean difference above this stops the run; default: 1e-4 (float32), "
        "0.05 (bf16), 0.1 (int8_matmul)",
    )


@dataclass(frozen=True)
class ParityBounds:
    """Bounds of |sampler's log-prob - learner's log-prob|.

    Attributes:
        probe: of the statistic of `pipeline.rollout.parity.probe_statistic` at the start.
        mean_stop: a step's mean above it ends the run.
        p999: a step's 99.9th percentile above it raises the alarm `disagreement`.
    """

    probe: float
    mean_stop: float
    p999: float


# Twice what rounding does on Gemma 3 270m, and half of what one layer without its adapter does,
# where the format separates them; docs/benchmarks.md has both.
_FLOAT32 = ParityBounds(probe=1e-3, mean_stop=1e-4, p999=1e-3)
_BFLOAT16 = ParityBounds(probe=0.1, mean_stop=0.05, p999=1.5)
_INT8_WEIGHTS = ParityBounds(probe=0.14, mean_stop=0.05, p999=1.5)
_INT8_CACHES = ParityBounds(probe=0.2, mean_stop=0.1, p999=2.0)
_INT8_ACTIVATIONS = ParityBounds(probe=0.75, mean_stop=0.2, p999=3.0)


def measured_bounds(model: Model, plan: Plan) -> ParityBounds:
    """Default bounds of this base, these rollout weights and these caches."""
    if "int8_matmul" in (plan.rollout_weights, model.quantization):
        return _INT8_ACTIVATIONS
    if plan.kv_cache == "int8":
        return _INT8_CACHES
    if plan.rollout_weights == "int8":
        return _INT8_WEIGHTS
    return _BFLOAT16 if model.dtype == "bfloat16" else _FLOAT32
