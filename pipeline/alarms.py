"""Alarms: rules over a run's steps and validations, and when they raise one.

A rule is an entry of `RULES`, with a threshold in `configs/alarms.py`. Where absolute values have
no meaning, its value is relative to the run's own earlier steps.

A rule is judged as soon as its metrics are there: before the update those of rollouts and of the
last validation, so that bad rewards stop the run before they are learned; after it those of the
learner; at the end of the run those of its last validation. An alarm is raised in the last of
`Threshold.steps` consecutive steps beyond the threshold, and again only after one that is not
beyond it. Steps without a value neither count nor interrupt. All of this is a function of the
recorded metrics and validations: a resumed run has no other state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from statistics import fmean, median
from typing import Any, Literal

from configs.alarms import NOISE, START_STEPS, THRESHOLDS, Threshold
from configs.schema import Config
from pipeline.evaluate.summary import mean_of, show_interval, show_mean

Validation = Mapping[str, Any]
"""The journal entry of a validation whose metric has a value and an interval."""


@dataclass(frozen=True)
class Alarm:
    """A rule applies to a step.

    `part` is the part of the reward, "" for the whole run; `fact` says what happened, `text` also
    where to look and what to do.
    """

    rule: str
    part: str
    step: int
    value: float
    threshold: float
    action: Literal["log", "stop"]
    fact: str
    text: str

    @property
    def facts(self) -> dict[str, Any]:
        """What the journal's event `alarm` records."""
        return {name: value for name, value in vars(self).items() if name != "text"}


@dataclass(frozen=True)
class History:
    """What rules know of a run.

    Metrics of the steps so far, of which the last one is judged, and the validations so far, in the
    order of their steps.
    """

    config: Config
    rows: Sequence[Mapping[str, float]]
    validations: Sequence[Validation]


Values = Callable[[History], Mapping[str, tuple[float, str]]]
"""What a rule's threshold applies to and the fact in words, by part of the reward ("" for the whole
run); none where it is not known."""


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        name: by which `alarms.off` and `alarms.stop` name it.
        values: what its threshold applies to.
        advice: where to look and what to do.
    """

    name: str
    values: Values
    advice: str


def step_alarms(
    config: Config,
    rows: Sequence[Mapping[str, float]],
    validations: Sequence[Mapping[str, Any]],
    *,
    ended: bool = False,
) -> list[Alarm]:
    """The alarms of a step, in the order of the rules.

    Args:
        config: of the run.
        rows: finite metrics of the steps up to this one, with their number from 1 under `step`.
        validations: journal entries; those of later versions are ignored.
        ended: whether no step follows: judges the validation after the last one, which a next step
            would judge, and stops nothing.
    """
    step = int(rows[-1]["step"])
    if ended:
        rows = [*rows, {"step": step + 1}]
    known = [one for one in validations if mean_of(one) is not None and one["ci95"] is not None]

    def before(number: int) -> History:
        """What was known `number` steps ago."""
        until = rows[: len(rows) - number]
        return History(config, until, [one for one in known if one["step"] < until[-1]["step"]])

    alarms = []
    for rule in RULES:
        threshold = _threshold(rule, config)
        found = {} if rule.name in config.alarms.off else rule.values(before(0))
        for part, (value, fact) in found.items():
            streak = 0
            for number in range(len(rows)):
                earlier = rule.values(before(number)).get(part)
                if earlier is not None:
                    if streak > threshold.steps or not threshold.exceeds(earlier[0]):
                        break
                    streak += 1
            if streak == threshold.steps:
                stops = rule.name in config.alarms.stop and not ended
                follows = "; the run stops with a checkpoint (alarms.stop)" if stops else ""
                alarms.append(
                    Alarm(
                        rule.name,
                        part,
                        step,
                        value,
                        threshold.value,
                        action="stop" if stops else "log",
                        fact=fact,
                        text=f"alarm {rule.name}: step {step}: {fact}, {threshold}{follows}; "
                        f"{rule.advice}",
                    )
                )
    return alarms


def _threshold(rule: Rule, config: Config) -> Threshold:
    """The threshold of a rule; that of `disagreement` depends on the number format."""
    found = THRESHOLDS[rule.name]
    if rule.name == "disagreement":
        return replace(found, value=config.mismatch_bounds.p999)
    return found


# --- the values of rules


def _metric(name: str, fact: str) -> Values:
    """A metric of the step; `fact` is formatted with it."""

    def values(history: History) -> dict[str, tuple[float, str]]:
        value = history.rows[-1].get(name)
        return {} if value is None else {"": (value, fact.format(value))}

    return values


def _all_equal(history: History) -> dict[str, tuple[float, str]]:
    equal, mixed = (history.rows[-1].get(f"groups/{kind}", 0.0) for kind in ("all_equal", "mixed"))
    if not equal + mixed:
        return {}
    share = equal / (equal + mixed)
    fact = f"the rewards of {share:.1%} of the groups are all equal, which gives no policy gradient"
    return {"": (share, fact)}


def _length_correlation(history: History) -> dict[str, tuple[float, str]]:
    found = history.rows[-1].get("reward/corr_length")
    if found is None:
        return {}
    fact = f"the reward and the length of the completion have a correlation of {found:.2f}"
    return {"": (abs(found), fact)}


def _to_start(name: str, fact: str) -> Values:
    """A metric relative to its mean in the first `START_STEPS` steps that have it."""

    def values(history: History) -> dict[str, tuple[float, str]]:
        now = history.rows[-1].get(name)
        first = [row[name] for row in history.rows if name in row][:START_STEPS]
        if now is None or len(first) < START_STEPS or not fmean(first):
            return {}
        return {"": (now / fmean(first), fact.format(now / fmean(first)))}

    return values


def _to_steps_before(name: str, what: str) -> Values:
    """A share of the rollouts relative to its median in the `START_STEPS` steps before.

    A fall of at most `NOISE` half-widths of its 95% interval may be due to the prompts and samples
    of a step: the value is 1.

    Args:
        name: the share; half the width of its interval has the suffix `_half_width`.
        what: of the rollouts.
    """
    width = f"{name}_half_width"

    def values(history: History) -> dict[str, tuple[float, str]]:
        *earlier, now = history.rows
        rows = [row for row in earlier[-START_STEPS:] if width in row]
        if width not in now or not rows:
            return {}
        noise = NOISE * hypot(now[width], median(row[width] for row in rows))
        before = median(row[name] for row in rows)
        fact = f"{now[name]:.1%} of the rollouts {what}, after {before:.1%} in the steps before"
        return {"": (1.0 if before - now[name] <= noise else now[name] / before, fact)}

    return values


def _value(validation: Validation) -> float:
    """The metric that selects the best version."""
    found = mean_of(validation)
    assert found is not None
    return found


def _half_width(validation: Validation) -> float:
    """Half the width of the 95% interval of its value, to the low side."""
    return _value(validation) - float(validation["ci95"][0])


def _validation_falls(history: History) -> dict[str, tuple[float, str]]:
    """Distance of the last validation to that which GRPO starts from, in the latter's half-widths.

    GRPO starts from the last validation up to the end of the SFT phase.
    """
    if not history.validations:
        return {}
    first, *later = history.validations
    start = [first, *(one for one in later if one["step"] <= history.config.sft_steps)][-1]
    last = history.validations[-1]
    if not _half_width(start):
        return {}
    value = (_value(start) - _value(last)) / _half_width(start)
    when = f"after step {start['step']}" if start["step"] else "before training"
    fact = (
        f"the validation after step {last['step']} is {show_mean(last)}, {value:.1f} half-widths "
        f"of the 95% interval below that {when}, {show_mean(start)} {show_interval(start)}"
    )
    return {"": (value, fact)}


def _rising_while_validation_falls(history: History) -> dict[str, tuple[float, str]]:
    """Distance of the last validation to the best one, for parts that have risen since; 0 else.

    Compares the means of as many steps as raise the alarm: the last ones, and those before the best
    validation (or the first ones).
    """
    steps = THRESHOLDS["rising_while_validation_falls"].steps
    rows, validations = history.rows, history.validations
    if not validations:
        return {}
    best, last = max(validations, key=_value), validations[-1]
    until = max(best["step"], rows[0]["step"] + steps - 1)
    count = bisect_right(rows, until, key=lambda row: row["step"])
    before, after = rows[max(0, count - steps) : count], rows[max(count, len(rows) - steps) :]
    if not _half_width(best) or len(after) < steps:
        return {}
    distance, found = (_value(best) - _value(last)) / _half_width(best), {}
    for part, weight in history.config.reward_weights.items():
        means = [
            [row[f"reward/{part}"] for row in some if f"reward/{part}" in row]
            for some in (before, after)
        ]
        if weight and all(means):
            fact = (
                f"reward {part!r} rises while the validation metric is {distance:.1f} half-widths "
                "of its 95% interval below its best"
            )
            found[part] = (distance if fmean(means[1]) > fmean(means[0]) else 0.0, fact)
    return found


RULES = (
    Rule(
        "excluded",
        _metric("reward/excluded_share", "{:.1%} of the rollouts have no reward"),
        "reward/excluded/CAUSE has the share of each cause, rewards.log has the errors",
    ),
    Rule(
        "all_equal",
        _all_equal,
        "read some rollouts: the prompts are too easy (groups/all_right) or too hard "
        "(groups/all_wrong), or the reward does not tell answers apart",
    ),
    Rule(
        "validation_falls",
        _validation_falls,
        "training makes the policy worse: read some rollouts, and begin again with a lower "
        "learner.lr, from here or from an earlier checkpoint (run.fork); the best version is kept, "
        "and is the one that is exported",
    ),
    Rule(
        "well_formed_falls",
        _to_steps_before("rollout/well_formed_share", "are well formed"),
        "read some rollouts: if the format does not come back, lower learner.lr and begin again "
        "from an earlier checkpoint (run.fork); a reward for the format keeps it",
    ),
    Rule(
        "correct_falls",
        _to_steps_before("rollout/correct_share", "have the right answer"),
        "read some rollouts, and see rollout/well_formed_share and rollout/truncated_share; lower "
        "learner.lr and begin again from an earlier checkpoint (run.fork)",
    ),
    Rule(
        "rising_while_validation_falls",
        _rising_while_validation_falls,
        "read rollouts with a high reward: the reward may be exploited, or the data memorized; the "
        "best version is kept",
    ),
    Rule(
        "length_correlation",
        _length_correlation,
        "see reward/corr_length and reward_parts/PART/corr_length",
    ),
    Rule(
        "entropy_collapse",
        _to_start(
            "rollout/entropy",
            f"the entropy of the policy is {{:.1%}} of that in the first {START_STEPS} steps",
        ),
        "read some rollouts of one group: if they are alike, the policy no longer explores; lower "
        "learner.lr, or raise learner.kl_coef or rollout.temperature",
    ),
    Rule(
        "length_explosion",
        _to_start(
            "rollout/tokens_mean",
            f"completions have {{:.1f}} times the tokens of the first {START_STEPS} steps",
        ),
        "read long rollouts; compare rollout/tokens_right with rollout/tokens_wrong, and see "
        "rollout/repetition; rollout.overlong_tokens penalizes length, and learner.loss = "
        '"dr_grpo" does not favour long wrong answers',
    ),
    Rule(
        "truncation",
        _metric(
            "rollout/truncated_share",
            "{:.1%} of the rollouts end at the token limit, and are scored without their end",
        ),
        "read their last lines: raise rollout.max_new_tokens if the answer would follow; set "
        "rollout.overlong_tokens if they repeat themselves (rollout/repetition)",
    ),
    Rule(
        "kl",
        _metric("learner/kl", "the KL of policy and reference is {:.2f} nats a token"),
        "compare rollouts with those of the first steps: the policy may exploit the reward, or no "
        "longer write text; raise learner.kl_coef or lower learner.lr",
    ),
    Rule(
        "disagreement",
        _metric(
            "learner/mismatch_p999",
            "the 99.9th percentile of the difference of sampler's and learner's log-probs is "
            "{:.3g}",
        ),
        "see learner/mismatch_mean and learner/mismatch_max; choose plan.rollout_weights and "
        "plan.kv_cache with less rounding, or correct for it with learner.importance_cap",
    ),
)
