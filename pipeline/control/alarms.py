"""Alarms: rules over the metrics of a run's steps.

A rule is a function in `RULES` and a table in `configs/alarms.py`. The function returns the values
that the table's threshold applies to, by part of the reward ("" for the whole run); none where they
are not known. Where absolute values have no meaning, the value is relative to the run's own earlier
steps. It is evaluated once in a step, as soon as its metrics are there: before the update those of
rollouts, so that bad rewards stop the run before they are learned; after it those of the learner
and of the whole step.

An alarm is raised in the last of `steps` consecutive steps beyond the threshold, and again only
after a step that is not beyond it. Steps without a value neither count nor interrupt.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from configs.alarms import START_STEPS, Action
from configs.schema import Config
from pipeline.contracts.decisions import JournalEntry
from pipeline.contracts.evaluations import mean_of

_ACTIONS: Mapping[Action, str] = {
    "checkpoint": "; a checkpoint follows",
    "stop": "; the run stops with a checkpoint",
}


@dataclass(frozen=True)
class Alarm:
    """A decision: report that a rule applies, and act.

    Attributes:
        rule: its table in `alarms`.
        part: the part of the reward; "" for the whole run.
        step: counted from 1.
        value: beyond the threshold.
        threshold: the setting.
        action: what follows.
        text: what happened, where to look, what to do.
    """

    rule: str
    part: str
    step: int
    value: float
    threshold: float
    action: Action
    text: str

    @property
    def journal(self) -> tuple[JournalEntry, ...]:
        """The event `alarm`."""
        facts = {name: value for name, value in vars(self).items() if name != "text"}
        return (JournalEntry("alarm", facts, self.text),)


@dataclass(frozen=True)
class Validation:
    """A validation result.

    Attributes:
        step: training steps before it.
        value: the metric that selects the best version.
        half_width: of its 95% interval, to the low side.
    """

    step: int
    value: float
    half_width: float

    @staticmethod
    def of(evaluated: Mapping[str, Any]) -> Validation | None:
        """Reads the journal entry of an evaluation; None if its metric has no value or interval."""
        value, interval = mean_of(evaluated), evaluated["ci95"]
        if value is None or interval is None:
            return None
        return Validation(evaluated["step"], value, value - interval[0])


@dataclass
class Earlier:
    """The values of a metric in the earlier steps that have it.

    Attributes:
        first: of the first `START_STEPS` steps, in their order.
        ascending: all.
    """

    first: list[float] = field(default_factory=list)
    ascending: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Adds the value of the next step."""
        if len(self.first) < START_STEPS:
            self.first.append(value)
        insort(self.ascending, value)

    @property
    def median(self) -> float:
        """The median of all values, of which there must be one."""
        middle = len(self.ascending) // 2
        low, high = self.ascending[middle - 1 + len(self.ascending) % 2], self.ascending[middle]
        return (low + high) / 2


@dataclass(frozen=True)
class History:
    """What rules know of a run.

    Attributes:
        config: of the run.
        metrics: of this step.
        rows: metrics of the steps so far, this one included, as far as rules compare steps.
        earlier: the same without this step, by metric.
        validations: in the order of their steps.
    """

    config: Config
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, float]]
    earlier: Mapping[str, Earlier]
    validations: Sequence[Validation]

    def of_parts(self, name: str) -> dict[str, float]:
        """A metric of the parts that have it, by part; `{}` in the name stands for the part."""
        names = {part: name.format(part) for part in self.config.reward_weights}
        return {part: self.metrics[own] for part, own in names.items() if own in self.metrics}

    def of_run(self, name: str) -> dict[str, float]:
        """A metric of the whole run."""
        return {"": self.metrics[name]} if name in self.metrics else {}


Values = Callable[[History], Mapping[str, float]]
"""The values that a rule's threshold applies to, by part of the reward."""


@dataclass(frozen=True)
class Rule:
    """A rule of `alarms`.

    Attributes:
        name: its table.
        values: the values that the threshold applies to.
        what: the fact in words, with `{value}` and `{part}`.
        advice: where to look and what to do.
    """

    name: str
    values: Values
    what: str
    advice: str


def _all_equal(history: History) -> dict[str, float]:
    equal, mixed = (history.metrics.get(f"groups/{kind}", 0.0) for kind in ("all_equal", "mixed"))
    return {"": equal / (equal + mixed)} if equal + mixed else {}


def _to_start(name: str) -> Values:
    """A metric relative to its mean in the first `START_STEPS` steps that have it."""

    def values(history: History) -> dict[str, float]:
        if name not in history.metrics:
            return {}
        now = history.metrics[name]
        first = [*history.earlier[name].first, now][:START_STEPS]
        if len(first) < START_STEPS or not fmean(first):
            return {}
        return {"": now / fmean(first)}

    return values


def _to_median(name: str) -> Values:
    """A metric relative to its median in the earlier steps, of which `START_STEPS` have it."""

    def values(history: History) -> dict[str, float]:
        earlier = history.earlier[name]
        if (
            name not in history.metrics
            or len(earlier.ascending) < START_STEPS
            or not earlier.median
        ):
            return {}
        return {"": history.metrics[name] / earlier.median}

    return values


def _rising_while_validation_falls(history: History) -> dict[str, float]:
    """Distance of the last validation to the best one, for parts that have risen since; 0 else.

    Compares the means of as many steps as raise the alarm: the last ones, and those before the best
    validation (or the first ones).
    """
    steps = history.config.alarms.rising_while_validation_falls.steps
    rows, validations = history.rows, history.validations
    if not rows or not validations:
        return {}
    best, last = max(validations, key=lambda one: one.value), validations[-1]
    until = max(best.step, rows[0]["step"] + steps - 1)
    count = bisect_right(rows, until, key=lambda row: row["step"])
    before, after = rows[max(0, count - steps) : count], rows[max(count, len(rows) - steps) :]
    if not best.half_width or len(after) < steps:
        return {}
    found = {}
    for part, weight in history.config.reward_weights.items():
        means = [
            [row[f"reward/{part}"] for row in some if f"reward/{part}" in row]
            for some in (before, after)
        ]
        if weight and all(means):
            rises = fmean(means[1]) > fmean(means[0])
            found[part] = (best.value - last.value) / best.half_width if rises else 0.0
    return found


def _length_correlation(history: History) -> dict[str, float]:
    return {name: abs(value) for name, value in history.of_run("reward/corr_length").items()}


RULES = (
    Rule(
        "excluded",
        lambda history: history.of_run("reward/excluded_share"),
        "{value:.1%} of the rollouts have no reward",
        "reward/excluded/CAUSE has the share of each cause, rewards.log has the errors",
    ),
    Rule(
        "all_equal",
        _all_equal,
        "the rewards of {value:.1%} of the groups are all equal, which gives no policy gradient",
        "read some rollouts: the prompts are too easy (groups/all_right) or too hard "
        "(groups/all_wrong), or the reward does not tell answers apart",
    ),
    Rule(
        "always_failing",
        lambda history: history.of_parts("reward_parts/{}/error_share"),
        "reward {part!r} fails for {value:.1%} of the rollouts",
        "rewards.log has the errors; correct the function or remove it",
    ),
    Rule(
        "always_none",
        lambda history: history.of_parts("reward_parts/{}/none_share"),
        "reward {part!r} is None, does not apply, for {value:.1%} of the rollouts",
        "check the condition under which it returns None, and the columns that it reads",
    ),
    Rule(
        "variance_gone",
        _to_start("reward/group_std"),
        f"rewards differ within groups by {{value:.1%}} of what they did in the first "
        f"{START_STEPS} steps",
        "read some rollouts: the task is solved, or all answers exploit the reward in the same way",
    ),
    Rule(
        "dominating",
        lambda history: history.of_parts("reward_parts/{}/variance_share"),
        "reward {part!r} makes {value:.2%} of the variance of the weighted rewards where several "
        "differ: the others have no influence",
        "compare weight x reward_parts/PART/group_std of the parts; change weights or scales",
    ),
    Rule(
        "rising_while_validation_falls",
        _rising_while_validation_falls,
        "reward {part!r} rises while the validation metric is {value:.1f} half-widths of its 95% "
        "interval below its best",
        "read rollouts with a high reward: the reward may be exploited, or the data memorized; the "
        "best version is kept",
    ),
    Rule(
        "length_correlation",
        _length_correlation,
        "the reward and the length of the completion have a correlation of {value:.2f} or "
        "-{value:.2f}",
        "see reward/corr_length and reward_parts/PART/corr_length",
    ),
    Rule(
        "entropy_collapse",
        _to_start("rollout/entropy"),
        f"the entropy of the policy is {{value:.1%}} of that in the first {START_STEPS} steps",
        "read some rollouts of one group: if they are alike, the policy no longer explores; lower "
        "learner.lr, or raise learner.kl_coef or rollout.temperature",
    ),
    Rule(
        "length_explosion",
        _to_start("rollout/tokens_mean"),
        f"completions have {{value:.1f}} times the tokens of the first {START_STEPS} steps",
        "read long rollouts; compare rollout/tokens_right with rollout/tokens_wrong, and see "
        "rollout/repetition; rollout.overlong_tokens penalizes length, and learner.loss = "
        '"dr_grpo" does not favour long wrong answers',
    ),
    Rule(
        "truncation",
        lambda history: history.of_run("rollout/truncated_share"),
        "{value:.1%} of the rollouts end at the token limit, and are scored without their end",
        "read their last lines: raise rollout.max_new_tokens if the answer would follow; set "
        "rollout.overlong_tokens if they repeat themselves (rollout/repetition)",
    ),
    Rule(
        "gradient_spike",
        _to_median("learner/grad_norm"),
        "the norm of the gradient is {value:.1f} times its median in the earlier steps",
        "read the step's rollouts, and see advantage/max, learner/ratio_max and "
        "learner/tokens_trained; learner.max_grad_norm bounds the effect of one; if they recur, "
        "lower learner.lr or raise rollout.prompts_per_step",
    ),
    Rule(
        "kl",
        lambda history: history.of_run("learner/kl"),
        "the KL of policy and reference is {value:.2f} nats a token",
        "compare rollouts with those of the first steps: the policy may exploit the reward, or no "
        "longer write text; raise learner.kl_coef or lower learner.lr",
    ),
    Rule(
        "disagreement",
        lambda history: history.of_run("learner/parity_p999"),
        "the 99.9th percentile of the difference of sampler's and learner's log-probs is "
        "{value:.3g}",
        "see learner/parity_mean and learner/parity_max; choose plan.rollout_weights and "
        "plan.kv_cache with less rounding, or correct for it with learner.importance_cap",
    ),
    Rule(
        "throughput_down",
        _to_median("speed/generated_tokens_per_s"),
        "tokens generated per second are {value:.1%} of their median in the earlier steps",
        "see which of time/*_s has grown, rollout/slots_useful and rollout/tokens_max, restarts "
        "and smaller sizes in the journal, and other work on the host",
    ),
)


_COMPARED = (
    "reward/group_std",
    "rollout/tokens_mean",
    "rollout/entropy",
    "learner/grad_norm",
    "speed/generated_tokens_per_s",
)
"""Metrics, besides those of parts, that rules compare over steps."""


def _known(validations: Sequence[Mapping[str, Any]]) -> list[Validation]:
    """The validations with a value and an interval."""
    found = (Validation.of(entry) for entry in validations)
    return [validation for validation in found if validation is not None]


@dataclass
class AlarmWatch:
    """The alarms of a run; its state is a function of the metrics that it was given.

    Attributes:
        config: of the run.
        rules: to evaluate.
    """

    config: Config
    rules: Sequence[Rule] = RULES
    _rows: list[dict[str, float]] = field(default_factory=list, init=False)
    _earlier: dict[str, Earlier] = field(init=False)
    _last: Mapping[str, float] = field(default_factory=dict, init=False)
    _streaks: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Names the metrics that rules compare over steps."""
        parts = (f"reward/{part}" for part in self.config.reward_weights)
        self._kept = ("step", *_COMPARED, *parts)
        self._earlier = {name: Earlier() for name in _COMPARED}

    def replay(
        self, rows: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, Any]]
    ) -> None:
        """Restores the state after the recorded steps of earlier processes."""
        known = _known(validations)
        for row in rows:
            self._judge(row, known)

    def judge(
        self, metrics: Mapping[str, float], validations: Sequence[Mapping[str, Any]]
    ) -> tuple[Alarm, ...]:
        """The alarms that a step raises, in the order of the rules.

        Args:
            metrics: finite metrics of the step, with its number from 1 under `step`.
            validations: journal entries; those of later versions are ignored.
        """
        return self._judge(metrics, _known(validations))

    def _judge(
        self, metrics: Mapping[str, float], validations: Sequence[Validation]
    ) -> tuple[Alarm, ...]:
        step = metrics["step"]
        self._record(metrics)
        known = [one for one in validations if one.step < step]
        history = History(self.config, metrics, self._rows, self._earlier, known)
        alarms = []
        for rule in self.rules:
            settings = self.config.alarm_rule(rule.name)
            if settings.action == "off":
                continue
            for part, value in rule.values(history).items():
                judged, streak = self._streaks.get((rule.name, part), (0, 0))
                if judged == step:
                    continue
                streak = streak + 1 if settings.exceeds(value) else 0
                self._streaks[rule.name, part] = step, streak
                if streak == settings.steps:
                    alarms.append(self._alarm(rule, part, value, step=int(step)))
        return tuple(alarms)

    def _record(self, metrics: Mapping[str, float]) -> None:
        """Adds what rules compare over steps, as far as it is known of this step."""
        kept = {name: metrics[name] for name in self._kept if name in metrics}
        if self._rows and self._rows[-1]["step"] == kept["step"]:
            self._rows[-1] |= kept
            return
        for name in self._earlier.keys() & self._last.keys():  # of the step before: complete now
            self._earlier[name].add(self._last[name])
        self._last = {}
        if len(kept) > 1:
            self._rows.append(kept)
            self._last = kept

    def _alarm(self, rule: Rule, part: str, value: float, *, step: int) -> Alarm:
        settings = self.config.alarm_rule(rule.name)
        setting = f"alarms.{rule.name}.{settings.bound} = {settings.threshold:g}"
        lasted = f" in {settings.steps} steps in a row" if settings.steps > 1 else ""
        what = rule.what.format(part=part, value=value)
        return Alarm(
            rule=rule.name,
            part=part,
            step=step,
            value=value,
            threshold=settings.threshold,
            action=settings.action,
            text=f"alarm {rule.name}: step {step}: {what}, {settings.bound} {setting}"
            f"{lasted}{_ACTIONS.get(settings.action, '')}; {rule.advice}",
        )
