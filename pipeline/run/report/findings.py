"""Problems of a run: each a fact of its records, with evidence and advice.

What a rule of `pipeline/alarms.py` watches is taken from the alarms in the journal and not
judged again. The other problems show over many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.alarms import RULES
from pipeline.evaluate.notices import EVALUATION_NOTICE, UNTRAINED_EXPORT
from pipeline.run.report.run_records import Row, RunRecords

Level = Literal["good", "note", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """A judgement about a run.

    Attributes:
        level: how it is to be taken.
        sentence: the judgement.
        evidence: the figures that it rests on.
        advice: what to do; "" where nothing is to be done.
    """

    level: Level
    sentence: str
    evidence: str
    advice: str = ""


LEAST_STEPS = 3
"""Steps that a judgement about all steps of a run needs."""
SLOW_REWARD = 0.2
"""Share of the steps' time spent waiting for rewards from which on they are slow."""
_ADVICE = {rule.name: rule.advice for rule in RULES}


def problems(run: RunRecords) -> list[Finding]:
    """All problems of a run, the worst first."""
    judges: tuple[Callable[[RunRecords], Iterator[Finding]], ...] = (
        _failed,
        _untrained_export,
        _equal_answers,
        _slow_reward,
        _faults,
        _alarms,
    )
    found = [finding for judge in judges for finding in judge(run)]
    return sorted(found, key=lambda one: one.level != "bad")


def _failed(run: RunRecords) -> Iterator[Finding]:
    if run.failure is not None:
        yield Finding(
            "bad",
            "The run failed.",
            run.failure,
            "correct the cause; then the same command continues from the last checkpoint",
        )


def _untrained_export(run: RunRecords) -> Iterator[Finding]:
    if why := run.summary.get(UNTRAINED_EXPORT):
        yield Finding(
            "bad",
            "The export is the model before training.",
            why,
            "look at the answers and their rewards in `rollouts/validation_*.jsonl`",
        )


def _equal_answers(run: RunRecords) -> Iterator[Finding]:
    for entry in run.entries(EVALUATION_NOTICE):
        yield Finding(
            "warning",
            "Before training all answers to a set had the same result.",
            entry["what"],
            "look at these answers, in `rollouts/*_before.jsonl`",
        )


def _slow_reward(run: RunRecords) -> Iterator[Finding]:
    total = run.time_use.step_s
    waited = sum(seconds for _, seconds in run.values("time/reward_s"))
    if total and waited > SLOW_REWARD * total:
        yield Finding(
            "warning",
            "The rewards are slow: the devices wait for them.",
            f"the run waits for rewards in {waited / total:.0%} of the steps' time, "
            f"{waited:.1f} s in {run.steps} steps",
            "raise the `concurrency` of an async function, `workers` of another one or "
            "rewards.workers; python -m launch.reward shows the time of each",
        )


def _faults(run: RunRecords) -> Iterator[Finding]:
    skipped = run.entries("update_skipped")
    if skipped:
        yield Finding(
            "bad",
            "Updates were skipped.",
            f"{len(skipped)} in all, the first in step {skipped[0]['step']}: {skipped[0]['why']}",
            f"read the batch in {skipped[0]['batch']}; a lower learner.lr may help",
        )
    errors = run.entries("reward_errors")
    if errors:
        parts: dict[str, int] = {}
        for entry in errors:
            parts[entry["name"]] = parts.get(entry["name"], 0) + entry["count"]
        yield Finding(
            "warning",
            f"Rewards failed {sum(parts.values())} times; these rollouts are excluded.",
            ", ".join(f"{name}: {count}" for name, count in parts.items())
            + f"; the first: {errors[0]['first']}",
            "rewards.log has the tracebacks",
        )


def _alarms(run: RunRecords) -> Iterator[Finding]:
    """A finding for each rule that raised alarms."""
    by_rule: dict[str, list[Row]] = {}
    for entry in run.entries("alarm"):
        by_rule.setdefault(entry["rule"], []).append(entry)
    for rule, alarms in by_rule.items():
        last, steps = alarms[-1], ", ".join(str(entry["step"]) for entry in alarms)
        fact = last["fact"]
        sentence = f"{fact[:1].upper()}{fact[1:]}."
        raised = f"alarm {rule} at step {steps}" if len(alarms) < 2 else f"alarms at steps {steps}"
        level: Level = "bad" if last.get("action") == "stop" else "warning"
        yield Finding(level, sentence, f"{raised}: {fact}", _ADVICE[rule])
