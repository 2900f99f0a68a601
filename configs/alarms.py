"""Settings of the alarms: a table for each rule, with its threshold and what the alarm does.

The rules are in `pipeline/alarm_rules.py`; `alarms.py` beside it evaluates them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from configs.base import FREE, Problem, Table

Action = Literal["off", "log", "checkpoint", "stop"]

START_STEPS = 10
"""GRPO steps with which rules compare that have no absolute threshold: the first ones for rules on
a change since the start; at least as many earlier ones for rules on a sudden change."""

NOISE = 1.5
"""Half-widths of its 95% interval up to which a fall may be due to the prompts and samples."""

_STEPS = "consecutive steps beyond the threshold that raise the alarm"
_ACTION = (
    "what the alarm does. off: nothing; log: journal, console and W&B; checkpoint: also a "
    "checkpoint after the step; stop: the run stops with a checkpoint"
)


class AlarmRule(Table):
    """A rule: `steps` consecutive steps beyond the threshold `above` or `below`."""

    bound: ClassVar[Literal["above", "below"]] = "above"
    unit: ClassVar[str] = "steps"

    steps: int = Field(10, ge=1, description=_STEPS)
    action: Action = Field("log", description=_ACTION)

    def conflicts(self) -> Iterator[Problem]:
        """Every setting has an effect."""
        if self.action == "off":
            yield from self.unused("steps", self.bound, why='with action = "off"')

    @property
    def threshold(self) -> float:
        """The value of `above` or `below`."""
        found: float = getattr(self, self.bound)
        return found

    def exceeds(self, value: float) -> bool:
        """Whether a value is beyond the threshold."""
        return value > self.threshold if self.bound == "above" else value < self.threshold


class Excluded(AlarmRule):
    """Rollouts without a reward."""

    above: float = Field(0.5, ge=0, le=1, description="share of a step's rollouts without a reward")
    steps: int = Field(1, ge=1, description=_STEPS)
    action: Action = Field("stop", description=_ACTION)


class AllEqual(AlarmRule):
    """Groups without a learning signal."""

    above: float = Field(
        0.95, ge=0, le=1, description="share of the groups with rewards that are all equal"
    )


class AlwaysFailing(AlarmRule):
    """A part of the reward that fails."""

    above: float = Field(
        0.99, ge=0, le=1, description="share of the rollouts for which a part failed"
    )
    steps: int = Field(3, ge=1, description=_STEPS)


class AlwaysNone(AlarmRule):
    """A part of the reward that never applies."""

    above: float = Field(
        0.99, ge=0, le=1, description="share of the rollouts for which a part returned None"
    )
    steps: int = Field(3, ge=1, description=_STEPS)


class VarianceGone(AlarmRule):
    """Rewards that no longer differ within groups."""

    bound = "below"

    below: float = Field(
        0.1,
        gt=0,
        description="mean standard deviation of the rewards within groups, relative to the first "
        f"{START_STEPS} steps",
    )


class Dominating(AlarmRule):
    """One part of the reward that leaves the others without influence."""

    above: float = Field(
        0.999,
        ge=0,
        le=1,
        description="share of one part in the variance of the weighted parts within groups, in "
        "groups in which at least two parts differ",
    )


class ValidationFalls(AlarmRule):
    """A policy that validates worse than before training."""

    unit = "validations"

    above: float = Field(
        1.0,
        ge=0,
        description="how far a validation is below that before training (after SFT, if there is an "
        "SFT phase), in half-widths of the 95% interval of the latter",
    )
    steps: int = Field(
        1, ge=1, description="consecutive validations beyond the threshold that raise the alarm"
    )


_FALL = (
    f"relative to the median of the {START_STEPS} steps before or, at the start, of those that "
    f"there are; a fall within {NOISE:g} half-widths of its 95% interval counts as none"
)


class WellFormedFalls(AlarmRule):
    """A policy that loses the format."""

    bound = "below"

    below: float = Field(
        0.5, gt=0, lt=1, description=f"share of the rollouts that are well formed, {_FALL}"
    )
    steps: int = Field(1, ge=1, description=_STEPS)


class CorrectFalls(AlarmRule):
    """A policy that loses the right answers."""

    bound = "below"

    below: float = Field(
        0.5, gt=0, lt=1, description=f"share of the rollouts with the right answer, {_FALL}"
    )
    steps: int = Field(1, ge=1, description=_STEPS)


class RisingWhileValidationFalls(AlarmRule):
    """A part of the reward that rises while the validation metric falls."""

    above: float = Field(
        1.5,
        ge=0,
        description="how far the last validation is below the best one, in half-widths of the "
        "best one's 95% interval, while a part's mean has risen since",
    )


class LengthCorrelation(AlarmRule):
    """A reward that measures little but the length."""

    above: float = Field(
        0.9,
        ge=0,
        le=1,
        description="absolute correlation of the weighted reward and the completion's tokens",
    )


class EntropyFalls(AlarmRule):
    """An update that takes most of the exploration."""

    bound = "below"

    below: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="entropy of the policy, by the sampled tokens, relative to the step before; a "
        f"fall within {NOISE:g} half-widths of its 95% interval counts as none",
    )
    steps: int = Field(1, ge=1, description=_STEPS)


class EntropyCollapse(AlarmRule):
    """A policy that no longer explores."""

    bound = "below"

    below: float = Field(
        0.05,
        gt=0,
        description="entropy of the policy, by the sampled tokens, relative to the first "
        f"{START_STEPS} steps",
    )


class LengthExplosion(AlarmRule):
    """Completions that become much longer."""

    above: float = Field(
        3.0,
        gt=0,
        description=f"mean tokens of a completion, relative to the first {START_STEPS} steps",
    )


class Truncation(AlarmRule):
    """Completions that reach the token limit."""

    above: float = Field(
        0.25, ge=0, le=1, description="share of the rollouts that end at max_new_tokens"
    )


class GradientSpike(AlarmRule):
    """A gradient far larger than before."""

    above: float = Field(
        10.0,
        gt=0,
        description="norm of the gradient, before clipping, relative to the median of all earlier "
        "steps",
    )
    steps: int = Field(1, ge=1, description=_STEPS)


class Kl(AlarmRule):
    """A policy far from its reference."""

    above: float = Field(
        0.5, gt=0, description="KL(policy || reference), mean over learned tokens, in nats"
    )


class Disagreement(AlarmRule):
    """Log-probs of sampler and learner that differ."""

    above: float | None = Field(
        None,
        gt=0,
        description="99.9th percentile of |log-prob of the sampler - log-prob of the learner|; "
        'default: 0.001 (float32), 1.5 (bf16, plan.rollout_weights = "int8"), 2 (plan.kv_cache = '
        '"int8"), 3 (int8_matmul)',
    )
    steps: int = Field(1, ge=1, description=_STEPS)


class ThroughputDown(AlarmRule):
    """A run that becomes slower."""

    bound = "below"

    below: float = Field(
        0.5,
        gt=0,
        description="tokens generated per second of the steps, relative to the median of all "
        "earlier steps",
    )
    steps: int = Field(5, ge=1, description=_STEPS)

    def conflicts(self) -> Iterator[Problem]:
        """Times, which a resumed run does not repeat, decide on nothing."""
        yield from super().conflicts()
        if self.action in {"checkpoint", "stop"}:
            what = 'times differ from run to run and are no reason to stop; nearest valid: "log"'
            yield "action", what


class Alarms(Table):
    """Rules that watch the run, each with a threshold and an action."""

    model_config = ConfigDict(json_schema_extra=FREE)

    excluded: Excluded = Excluded()
    all_equal: AllEqual = AllEqual()
    always_failing: AlwaysFailing = AlwaysFailing()
    always_none: AlwaysNone = AlwaysNone()
    variance_gone: VarianceGone = VarianceGone()
    dominating: Dominating = Dominating()
    validation_falls: ValidationFalls = ValidationFalls()
    well_formed_falls: WellFormedFalls = WellFormedFalls()
    correct_falls: CorrectFalls = CorrectFalls()
    rising_while_validation_falls: RisingWhileValidationFalls = RisingWhileValidationFalls()
    length_correlation: LengthCorrelation = LengthCorrelation()
    entropy_falls: EntropyFalls = EntropyFalls()
    entropy_collapse: EntropyCollapse = EntropyCollapse()
    length_explosion: LengthExplosion = LengthExplosion()
    truncation: Truncation = Truncation()
    gradient_spike: GradientSpike = GradientSpike()
    kl: Kl = Kl()
    disagreement: Disagreement = Disagreement()
    throughput_down: ThroughputDown = ThroughputDown()

    def rule(self, name: str) -> AlarmRule:
        """The settings of a rule."""
        found: AlarmRule = getattr(self, name)
        return found
