"""Bounds on the difference between sampler and learner, with defaults by number format."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from configs.base import Table
from configs.model import Model
from configs.plan import Plan


class Parity(Table):
    """Bounds on |log-prob of the sampler - log-prob of the learner| for the same token.

    The bf16 defaults also apply to a float32 base with `model.quantization = "int8_matmul"` or
    `plan.kv_cache = "int8"`. With `plan.rollout_weights` the defaults are, in the order below, 1.0
    and 0.05 for int8, and 1.25 and 0.1 for int8_matmul. Rule `alarms.disagreement` reports large
    differences of single tokens.
    """

    probe: float | None = Field(
        None,
        gt=0,
        description="maximum difference of the probe at the start; default: 1e-4 (float32), 0.75 "
        "(bf16)",
    )
    mean_stop: float | None = Field(
        None,
        gt=0,
        description="a step's mean difference above this stops the run; default: 1e-4 (float32), "
        "0.05 (bf16)",
    )


@dataclass(frozen=True)
class ParityBounds:
    """Bounds of |sampler's log-prob - learner's log-prob|.

    Attributes:
        probe: of any token at start.
        mean_stop: a step's mean above it ends the run.
        p999: a step's 99.9th percentile above it raises the alarm `disagreement`.
    """

    probe: float
    mean_stop: float
    p999: float


_EXACT = ParityBounds(probe=1e-4, mean_stop=1e-4, p999=1e-3)
# More than twice the values of the demo; by rounding alone a token of the probe differs by 0.3.
_ROUNDED = ParityBounds(probe=0.75, mean_stop=0.05, p999=0.5)
_INTEGERS = {
    "int8": ParityBounds(probe=1.0, mean_stop=0.05, p999=0.5),
    "int8_matmul": ParityBounds(probe=1.25, mean_stop=0.1, p999=1.25),
}
"""Bounds by `plan.rollout_weights`, if the sampler rounds otherwise than the learner's base."""


def measured_bounds(model: Model, plan: Plan) -> ParityBounds:
    """Default bounds of this base and these rollout weights."""
    if plan.rollout_weights in _INTEGERS:
        return _INTEGERS[plan.rollout_weights]
    # If activations, or keys and values, are rounded to integers, differences of float32's size
    # select other integers.
    integers = model.quantization == "int8_matmul" or plan.kv_cache == "int8"
    return _ROUNDED if integers or model.dtype == "bfloat16" else _EXACT
