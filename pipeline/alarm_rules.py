"""Rules of the alarms: what is watched in a run's steps and validations, and what to do about it.

A rule is an entry of `RULES`, with a threshold and a setting in `configs/alarms.py`. Its function
returns the values that the threshold applies to, by part of the reward ("" for the whole run); none
where they are not known. Where absolute values have no meaning, the value is relative to the run's
own earlier steps. `alarms.py` decides when a rule is judged, and what follows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean, median
from typing import Any

from configs.alarms import NOISE, START_STEPS, THRESHOLDS, Action
from configs.schema import Config
from pipeline.evaluate.summary import mean_of, show_interval, show_mean

Validation = Mapping[str, Any]
"""The journal entry of a validation whose metric has a value and an interval."""


@dataclass(frozen=True)
class History:
    """What rules know of a run.

    Attributes:
        config: of the run.
        rows: metrics of the steps so far, the one that is judged last.
        validations: so far, in the order of their steps.
    """

    config: Config
    rows: Sequence[Mapping[str, float]]
    validations: Sequence[Validation]

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the step that is judged."""
        return self.rows[-1]

    def series(self, name: str) -> list[float]:
        """A metric of the steps that have it."""
        return [row[name] for row in self.rows if name in row]

    def of_parts(self, name: str) -> dict[str, float]:
        """A metric of the parts that have it, by part; `{}` in the name stands for the part."""
        names = {part: name.format(part) for part in self.config.reward_weights}
        return {part: self.metrics[own] for part, own in names.items() if own in self.metrics}

    def of_run(self, name: str) -> dict[str, float]:
        """A metric of the whole run."""
        return {"": self.metrics[name]} if name in self.metrics else {}


Values = Callable[[History], Mapping[str, float]]
"""The values that a rule's threshold applies to, by part of the reward."""
Figures = Callable[[History], Mapping[str, float | str]]
"""Further figures of a rule's sentence, by name."""


@dataclass(frozen=True)
class Rule:
    """A rule of `alarms`.

    Attributes:
        name: its key.
        values: the values that the threshold applies to.
        what: the fact in words, with `{value}`, `{part}` and the names of `figures`.
        advice: where to look and what to do.
        figures: of `what`; read where there are values.
    """

    name: str
    values: Values
    what: str
    advice: str
    figures: Figures = lambda _: {}

    def action(self, config: Config) -> Action:
        """What an alarm of this rule does."""
        found: Action = getattr(config.alarms, self.name)
        return found


def _all_equal(history: History) -> dict[str, float]:
    equal, mixed = (history.metrics.get(f"groups/{kind}", 0.0) for kind in ("all_equal", "mixed"))
    return {"": equal / (equal + mixed)} if equal + mixed else {}


def _to_start(name: str) -> Values:
    """A metric relative to its mean in the first `START_STEPS` steps that have it."""

    def values(history: History) -> dict[str, float]:
        first = history.series(name)[:START_STEPS]
        if name not in history.metrics or len(first) < START_STEPS or not fmean(first):
            return {}
        return {"": history.metrics[name] / fmean(first)}

    return values


def _to_median(name: str) -> Values:
    """A metric relative to its median in the earlier steps, of which `START_STEPS` have it."""

    def values(history: History) -> dict[str, float]:
        *earlier, now = history.series(name) or [0.0]
        if name not in history.metrics or len(earlier) < START_STEPS or not median(earlier):
            return {}
        return {"": now / median(earlier)}

    return values


def _falls(name: str, metric: str, *, window: int, what: str, advice: str) -> Rule:
    """A rule on a mean over rollouts, relative to its median in the `window` steps before.

    A fall of at most `NOISE` half-widths of its 95% interval may be due to the prompts and samples
    of a step: the value is 1.

    Args:
        name: of the rule.
        metric: the mean; half the width of its interval has the suffix `_half_width`.
        window: steps to compare with, fewer at the start.
        what: see `Rule`; `{now}` and `{before}` are the mean and the median.
        advice: see `Rule`.
    """
    width = f"{metric}_half_width"

    def figures(history: History) -> dict[str, float]:
        rows = [row for row in history.rows[-1 - window : -1] if width in row]
        if width not in history.metrics or not rows:
            return {}
        noise = NOISE * hypot(history.metrics[width], median(row[width] for row in rows))
        before = median(row[metric] for row in rows)
        return {"now": history.metrics[metric], "before": before, "noise": noise}

    def values(history: History) -> dict[str, float]:
        found = figures(history)
        if not found:
            return {}
        is_noise = found["before"] - found["now"] <= found["noise"]
        return {"": 1.0 if is_noise else found["now"] / found["before"]}

    return Rule(name, values, what, advice, figures)


def _value(validation: Validation) -> float:
    """The metric that selects the best version."""
    found = mean_of(validation)
    assert found is not None
    return found


def _half_width(validation: Validation) -> float:
    """Half the width of the 95% interval of its value, to the low side."""
    return _value(validation) - float(validation["ci95"][0])


def _start(history: History) -> Validation:
    """The validation that GRPO starts from: the last one up to the end of the SFT phase."""
    first, *later = history.validations
    return [first, *(one for one in later if one["step"] <= history.config.sft_steps)][-1]


def _validation_falls(history: History) -> dict[str, float]:
    """Distance of the last validation to that at the start, in half-widths of the latter."""
    start, last = _start(history), history.validations[-1]
    if not _half_width(start):
        return {}
    return {"": (_value(start) - _value(last)) / _half_width(start)}


def _validation_figures(history: History) -> dict[str, str]:
    start, last = _start(history), history.validations[-1]
    when = f"after step {start['step']}" if start["step"] else "before training"
    figures = {"when": when, "before": show_mean(start), "interval": show_interval(start)}
    return figures | {"now": show_mean(last)}


def _rising_while_validation_falls(history: History) -> dict[str, float]:
    """Distance of the last validation to the best one, for parts that have risen since; 0 else.

    Compares the means of as many steps as raise the alarm: the last ones, and those before the best
    validation (or the first ones).
    """
    steps = THRESHOLDS["rising_while_validation_falls"].steps
    rows, validations = history.rows, history.validations
    if not rows or not validations:
        return {}
    best, last = max(validations, key=_value), validations[-1]
    until = max(best["step"], rows[0]["step"] + steps - 1)
    count = bisect_right(rows, until, key=lambda row: row["step"])
    before, after = rows[max(0, count - steps) : count], rows[max(count, len(rows) - steps) :]
    if not _half_width(best) or len(after) < steps:
        return {}
    found = {}
    for part, weight in history.config.reward_weights.items():
        means = [
            [row[f"reward/{part}"] for row in some if f"reward/{part}" in row]
            for some in (before, after)
        ]
        if weight and all(means):
            rises = fmean(means[1]) > fmean(means[0])
            found[part] = (_value(best) - _value(last)) / _half_width(best) if rises else 0.0
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
        "validation_falls",
        _validation_falls,
        "the validation is {now}, {value:.1f} half-widths of the 95% interval below that {when}, "
        "{before} {interval}",
        "training makes the policy worse: read some rollouts, and begin again with a lower "
        "learner.lr, from here or from an earlier checkpoint (run.fork); the best version is kept, "
        "and is the one that is exported",
        _validation_figures,
    ),
    _falls(
        "well_formed_falls",
        "rollout/well_formed_share",
        window=START_STEPS,
        what="{now:.1%} of the rollouts are well formed, after {before:.1%} in the steps before",
        advice="read some rollouts: if the format does not come back, lower learner.lr and begin "
        "again from an earlier checkpoint (run.fork); a reward for the format keeps it",
    ),
    _falls(
        "correct_falls",
        "rollout/correct_share",
        window=START_STEPS,
        what="{now:.1%} of the rollouts have the right answer, after {before:.1%} in the steps "
        "before",
        advice="read some rollouts, and see rollout/well_formed_share and rollout/truncated_share; "
        "lower learner.lr and begin again from an earlier checkpoint (run.fork)",
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
    _falls(
        "entropy_falls",
        "rollout/entropy",
        window=1,
        what="the entropy of the policy is {now:.3g} nats a token, after {before:.3g} in the step "
        "before",
        advice="one update has taken most of the exploration: lower learner.lr or "
        "learner.max_grad_norm, or raise learner.warmup_steps",
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
        lambda history: history.of_run("learner/mismatch_p999"),
        "the 99.9th percentile of the difference of sampler's and learner's log-probs is "
        "{value:.3g}",
        "see learner/mismatch_mean and learner/mismatch_max; choose plan.rollout_weights and "
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
