"""Alarms: when the rules of `alarm_rules.py` are judged, and what an alarm does.

A rule is judged once in a step, as soon as its metrics are there: before the update those of
rollouts, so that bad rewards stop the run before they are learned; after it those of the learner
and of the whole step; after a validation those on its result.

An alarm is raised in the last of `steps` consecutive steps (or validations) beyond the threshold,
and again only after one that is not beyond it. Steps without a value neither count nor interrupt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.alarms import Action
from configs.schema import Config
from pipeline.alarm_rules import (
    COMPARED,
    FALLING,
    RULES,
    Earlier,
    History,
    Rule,
    Validation,
)

_ACTIONS: Mapping[Action, str] = {
    "checkpoint": "; a checkpoint follows",
    "stop": "; the run stops with a checkpoint",
}


@dataclass(frozen=True)
class Alarm:
    """A rule applies.

    Attributes:
        rule: its table in `alarms`.
        part: the part of the reward; "" for the whole run.
        step: counted from 1.
        value: beyond the threshold.
        threshold: the setting.
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
        self._kept = ("step", *COMPARED, *FALLING, *parts)
        self._earlier = {name: Earlier() for name in COMPARED}

    def replay(
        self,
        rows: Sequence[Mapping[str, float]],
        validations: Sequence[Mapping[str, Any]],
        journaled: Sequence[Mapping[str, Any]],
    ) -> None:
        """Restores the state after the recorded steps of earlier processes.

        The last validation remains to be judged if an alarm of it is not journaled: its process
        ended in between.

        Args:
            rows: metrics of the steps.
            validations: journal entries.
            journaled: those of the alarms.
        """
        known, before, alarms = _known(validations), dict(self._streaks), tuple[Alarm, ...]()
        for row in rows:
            self._judge(row, known)
            before = dict(self._streaks)
            alarms = self._judge({"step": row["step"]}, known)
        raised = {(entry["rule"], entry["part"], entry["step"]) for entry in journaled}
        if any((alarm.rule, alarm.part, alarm.step) not in raised for alarm in alarms):
            self._streaks = before

    def judge(
        self, metrics: Mapping[str, float], validations: Sequence[Mapping[str, Any]]
    ) -> tuple[Alarm, ...]:
        """The alarms that a step raises, in the order of the rules.

        Args:
            metrics: finite metrics of the step, with its number from 1 under `step`; only the
                number after the step's validation.
            validations: journal entries; those of later versions are ignored.
        """
        return self._judge(metrics, _known(validations))

    def _judge(
        self, metrics: Mapping[str, float], validations: Sequence[Validation]
    ) -> tuple[Alarm, ...]:
        step, is_validated = metrics["step"], len(metrics) == 1
        if not is_validated:
            self._record(metrics)
        known = [one for one in validations if one.step < step + is_validated]
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
                    fact = rule.what.format(part=part, value=value, **rule.figures(history))
                    alarms.append(self._alarm(rule, part, value, fact, step=int(step)))
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

    def _alarm(self, rule: Rule, part: str, value: float, fact: str, *, step: int) -> Alarm:
        settings = self.config.alarm_rule(rule.name)
        setting = f"alarms.{rule.name}.{settings.bound} = {settings.threshold:g}"
        lasted = f" in {settings.steps} {settings.unit} in a row" if settings.steps > 1 else ""
        return Alarm(
            rule=rule.name,
            part=part,
            step=step,
            value=value,
            threshold=settings.threshold,
            action=settings.action,
            fact=fact,
            text=f"alarm {rule.name}: step {step}: {fact}, {settings.bound} {setting}"
            f"{lasted}{_ACTIONS.get(settings.action, '')}; {rule.advice}",
        )
