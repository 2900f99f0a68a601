"""The alarms: the threshold of each rule, and the setting of what it does.

The rules are in `pipeline/alarm_rules.py`; `alarms.py` beside it evaluates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import ConfigDict, Field

from configs.base import FREE, Table

Action = Literal["off", "log", "checkpoint", "stop"]

START_STEPS = 10
"""GRPO steps with which rules compare that have no absolute threshold: the first ones for rules on
a change since the start; at least as many earlier ones for rules on a sudden change."""

NOISE = 1.5
"""Half-widths of its 95% interval up to which a fall may be due to the prompts and samples."""


@dataclass(frozen=True)
class Threshold:
    """When a rule raises an alarm.

    Attributes:
        bound: whether values above or below the threshold count.
        value: the threshold.
        steps: consecutive ones beyond it that raise the alarm.
        unit: of `steps`.
    """

    bound: Literal["above", "below"]
    value: float
    steps: int = 10
    unit: Literal["steps", "validations"] = "steps"

    def __str__(self) -> str:
        """In words."""
        lasted = f" in {self.steps} {self.unit} in a row" if self.steps > 1 else ""
        return f"{self.bound} {self.value:g}{lasted}"

    def exceeds(self, value: float) -> bool:
        """Whether a value is beyond the threshold."""
        return value > self.value if self.bound == "above" else value < self.value


def _rule(threshold: Threshold, what: str, action: Action = "log") -> Any:
    return Field(
        action,
        description=f"{what}, {threshold}",
        json_schema_extra={"threshold": vars(threshold)},
    )


_FALL = (
    f"relative to the median of the {START_STEPS} steps before or, at the start, of those that "
    f"there are; a fall within {NOISE:g} half-widths of its 95% interval counts as none"
)
_SINCE = f"relative to the first {START_STEPS} steps"


class Alarms(Table):
    """What each alarm does. log: journal, console, W&B; checkpoint, stop: also that."""

    model_config = ConfigDict(json_schema_extra=FREE)

    excluded: Action = _rule(
        Threshold("above", 0.5, 1), "share of a step's rollouts without a reward", "stop"
    )
    all_equal: Action = _rule(
        Threshold("above", 0.95), "share of the groups with rewards that are all equal"
    )
    always_failing: Action = _rule(
        Threshold("above", 0.99, 3), "share of the rollouts for which a part of the reward failed"
    )
    always_none: Action = _rule(
        Threshold("above", 0.99, 3),
        "share of the rollouts for which a part of the reward returned None",
    )
    variance_gone: Action = _rule(
        Threshold("below", 0.1), f"mean standard deviation of the rewards within groups, {_SINCE}"
    )
    dominating: Action = _rule(
        Threshold("above", 0.999),
        "share of one part in the variance of the weighted parts within groups, in groups in which "
        "at least two parts differ",
    )
    validation_falls: Action = _rule(
        Threshold("above", 1.0, 1, "validations"),
        "how far a validation is below that before training (after SFT, if there is an SFT phase), "
        "in half-widths of the 95% interval of the latter",
    )
    well_formed_falls: Action = _rule(
        Threshold("below", 0.5, 1), f"share of the rollouts that are well formed, {_FALL}"
    )
    correct_falls: Action = _rule(
        Threshold("below", 0.5, 1), f"share of the rollouts with the right answer, {_FALL}"
    )
    rising_while_validation_falls: Action = _rule(
        Threshold("above", 1.5),
        "how far the last validation is below the best one, in half-widths of the best one's 95% "
        "interval, while the mean of a part of the reward has risen since",
    )
    length_correlation: Action = _rule(
        Threshold("above", 0.9),
        "absolute correlation of the weighted reward and the completion's tokens",
    )
    entropy_falls: Action = _rule(
        Threshold("below", 0.5, 1),
        "entropy of the policy, by the sampled tokens, relative to the step before; a fall within "
        f"{NOISE:g} half-widths of its 95% interval counts as none",
    )
    entropy_collapse: Action = _rule(
        Threshold("below", 0.05), f"entropy of the policy, by the sampled tokens, {_SINCE}"
    )
    length_explosion: Action = _rule(
        Threshold("above", 3.0), f"mean tokens of a completion, {_SINCE}"
    )
    truncation: Action = _rule(
        Threshold("above", 0.25), "share of the rollouts that end at rollout.max_new_tokens"
    )
    gradient_spike: Action = _rule(
        Threshold("above", 10.0, 1),
        "norm of the gradient, before clipping, relative to the median of all earlier steps",
    )
    kl: Action = _rule(
        Threshold("above", 0.5), "KL(policy || reference), mean over learned tokens, in nats"
    )
    disagreement: Action = Field(
        "log",
        description="99.9th percentile of |log-prob of the sampler - log-prob of the learner|, "
        'above 0.001 (float32), 1.5 (bf16, plan.rollout_weights = "int8"), 2 (plan.kv_cache = '
        '"int8"), 3 (int8_matmul)',
    )
    # Times, which a resumed run does not repeat, decide on nothing.
    throughput_down: Literal["off", "log"] = _rule(
        Threshold("below", 0.5, 5),
        "tokens generated per second of the steps, relative to the median of all earlier steps",
    )


THRESHOLDS = {
    name: Threshold(**cast("dict[str, Any]", field.json_schema_extra["threshold"]))
    for name, field in Alarms.model_fields.items()
    if isinstance(field.json_schema_extra, dict)
}
"""By rule; that of `disagreement` depends on the number format, see `configs/mismatch.py`."""
