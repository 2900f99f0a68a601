"""Alarms: when the rules of `alarm_rules.py` are judged, and what an alarm does.

A rule is judged as soon as its metrics are there: before the update those of rollouts, so that bad
rewards stop the run before they are learned; after it those of the learner and of the whole step;
after a validation those on its result.

An alarm is raised in the last of `steps` consecutive steps (or validations) beyond the threshold,
and again only after one that is not beyond it. Steps without a value neither count nor interrupt.
All of this is a function of the recorded metrics and validations: a resumed run has no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.alarms import THRESHOLDS, Action, Threshold
from configs.schema import Config
from pipeline.alarm_rules import RULES, History, Validation
from pipeline.evaluate.summary import mean_of

_ACTIONS: Mapping[Action, str] = {
    "checkpoint": "; a checkpoint follows",
    "stop": "; the run stops with a checkpoint",
}


@dataclass(frozen=True)
class Alarm:
    """A rule applies.

    Attributes:
        rule: its key in `alarms`.
        part: the part of the reward; "" for the whole run.
        step: counted from 1.
        value: beyond the threshold.
        threshold: of the rule.
        action: what follows.
        fact: what happened.
        text: what happened, where to look, what to do.
    """

    rule: str
    part: str
    step: int
    value: float
    threshold: float
    action: Action
    fact: str
    text: str

    @property
    def facts(self) -> dict[str, Any]:
        """What the journal's event `alarm` records."""
        return {name: value for name, value in vars(self).items() if name != "text"}


def step_alarms(
    config: Config, rows: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, Any]]
) -> list[Alarm]:
    """The alarms of a step, in the order of the rules.

    Args:
        config: of the run.
        rows: finite metrics of the steps up to this one, with their number from 1 under `step`.
        validations: journal entries; those of later versions are ignored.
    """
    known = _known(validations)

    def before(number: int) -> History:
        """What was known `number` steps ago."""
        until = rows[: len(rows) - number]
        return History(config, until, [one for one in known if one["step"] < until[-1]["step"]])

    return _alarms("steps", before, len(rows), step=int(rows[-1]["step"]))


def validation_alarms(
    config: Config, step: int, validations: Sequence[Mapping[str, Any]]
) -> list[Alarm]:
    """The alarms of the validation after `step` steps; none if there is no such validation.

    Args:
        config: of the run.
        step: of the current version.
        validations: journal entries, in the order of their steps.
    """
    known = _known(validations)
    if not known or known[-1]["step"] != step:
        return []
    return _alarms(
        "validations",
        lambda number: History(config, (), known[: len(known) - number]),
        len(known),
        step=step,
    )


def _known(validations: Sequence[Mapping[str, Any]]) -> list[Validation]:
    """The validations with a value and an interval."""
    return [one for one in validations if mean_of(one) is not None and one["ci95"] is not None]


def _alarms(unit: str, before: Callable[[int], History], count: int, *, step: int) -> list[Alarm]:
    """Judges the rules of a unit.

    Args:
        unit: of the rules' `steps`.
        before: the history so many units ago.
        count: number of histories.
        step: of the alarms.
    """
    now, alarms = before(0), list[Alarm]()
    for rule in RULES:
        threshold, action = threshold_of(rule.name, now.config), rule.action(now.config)
        if action == "off" or threshold.unit != unit:
            continue
        for part, value in rule.values(now).items():
            if not threshold.exceeds(value):
                continue
            streak = 0
            for number in range(count):
                earlier = rule.values(before(number)).get(part)
                if earlier is not None:
                    if streak > threshold.steps or not threshold.exceeds(earlier):
                        break
                    streak += 1
            if streak == threshold.steps:
                fact = rule.what.format(part=part, value=value, **rule.figures(now))
                text = (
                    f"alarm {rule.name}: step {step}: {fact}, {threshold} (alarms.{rule.name})"
                    f"{_ACTIONS.get(action, '')}; {rule.advice}"
                )
                facts = (rule.name, part, step, value, threshold.value, action, fact, text)
                alarms.append(Alarm(*facts))
    return alarms


def threshold_of(rule: str, config: Config) -> Threshold:
    """The threshold of a rule; that of `disagreement` depends on the number format."""
    found = THRESHOLDS.get(rule)
    return found or Threshold("above", config.mismatch_bounds.p999, steps=1)
