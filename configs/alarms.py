"""The alarms: the threshold of each rule, and the settings of what they do.

`pipeline/alarms.py` has the rules.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from configs.base import FREE, Table, checked, name_hint

START_STEPS = 10
"""GRPO steps that rules without an absolute threshold compare with."""

NOISE = 1.5
"""Half-widths of its 95% interval up to which a fall may be due to the prompts and samples."""


@dataclass(frozen=True)
class Threshold:
    """When a rule raises an alarm.

    Attributes:
        bound: whether values above or below the threshold count.
        value: the threshold.
        steps: consecutive steps beyond it that raise the alarm.
        what: what is compared with it.
    """

    bound: Literal["above", "below"]
    value: float
    steps: int = 10
    what: str = ""

    def __str__(self) -> str:
        """In words."""
        lasted = f" in {self.steps} steps in a row" if self.steps > 1 else ""
        return f"{self.bound} {self.value:g}{lasted}"

    def exceeds(self, value: float) -> bool:
        """Whether a value is beyond the threshold."""
        return value > self.value if self.bound == "above" else value < self.value


_FALL = (
    f"relative to the median of the {START_STEPS} steps before, or of those that there are; a fall "
    f"within {NOISE:g} half-widths of its 95% interval counts as none"
)
_SINCE = f"relative to the first {START_STEPS} steps"

THRESHOLDS = {
    "excluded": Threshold("above", 0.5, 1, "share of a step's rollouts without a reward"),
    "all_equal": Threshold("above", 0.95, what="share of the groups whose rewards are all equal"),
    "validation_falls": Threshold(
        "above",
        1.0,
        1,
        "how far a validation is below that before training (after SFT, if there is an SFT phase), "
        "in half-widths of the 95% interval of the latter",
    ),
    "well_formed_falls": Threshold(
        "below", 0.5, 1, f"share of the rollouts that are well formed, {_FALL}"
    ),
    "correct_falls": Threshold(
        "below", 0.5, 1, f"share of the rollouts with the right answer, {_FALL}"
    ),
    "rising_while_validation_falls": Threshold(
        "above",
        1.5,
        what="how far the last validation is below the best one, in half-widths of the best one's "
        "95% interval, while the mean of a part of the reward has risen since",
    ),
    "length_correlation": Threshold(
        "above",
        0.9,
        what="absolute correlation of the weighted reward and the completion's tokens",
    ),
    "entropy_collapse": Threshold(
        "below", 0.05, what=f"entropy of the policy, by the sampled tokens, {_SINCE}"
    ),
    "length_explosion": Threshold("above", 3.0, what=f"mean tokens of a completion, {_SINCE}"),
    "truncation": Threshold(
        "above", 0.25, what="share of the rollouts that end at rollout.max_new_tokens"
    ),
    "kl": Threshold(
        "above", 0.5, what="KL(policy || reference), mean over learned tokens, in nats"
    ),
    "disagreement": Threshold(
        "above",
        0.001,
        1,
        "99.9th percentile of |log-prob of the sampler - log-prob of the learner|, above 1.5 "
        '(bf16, plan.rollout_weights = "int8"), 2 (plan.kv_cache = "int8"), 3 (int8_matmul) or, in '
        "float32",
    ),
}
"""By rule; that of `disagreement` is `Config.mismatch_bounds.p999`."""


def _unknown(name: str) -> str | None:
    return None if name in THRESHOLDS else f"is not the name of a rule{name_hint(name, THRESHOLDS)}"


Rules = Annotated[
    tuple[
        Annotated[str, Field(json_schema_extra={"words": "that names a rule"}), checked(_unknown)],
        ...,
    ],
    Field(strict=False),
]


def _description() -> str:
    """The rules, each with its threshold, for `--help settings alarms`."""
    lines = ["Rules over the metrics; an alarm is written to journal, console and W&B."]
    for name, threshold in THRESHOLDS.items():
        text = f"{name}: {threshold.what}, {threshold}"
        lines += textwrap.wrap(text, width=100, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)


class Alarms(Table):
    """What alarms do."""

    model_config = ConfigDict(json_schema_extra=FREE | {"description": _description()})

    off: Rules = Field((), description="rules that raise no alarm, even if alarms.stop names them")
    stop: Rules = Field(
        ("excluded",),
        description="rules of which an alarm also stops the run, with a checkpoint; before the "
        'update if it is on rollouts. A list of your own replaces the default: repeat "excluded"',
    )
