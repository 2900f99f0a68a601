"""Problems of a run: each a fact of its records, with evidence and advice.

What a rule of `pipeline/alarm_rules.py` watches is taken from the alarms in the journal and not
judged again. The other problems show over many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pipeline.alarm_rules import RULES
from pipeline.evaluate.notices import EVALUATION_NOTICE, UNTRAINED_EXPORT
from pipeline.run.report.run_records import Row, RunRecords

Level = Literal["good", "note", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    """A judgement about a run.

    Attributes:
        kind: one word or several with underscores.
        level: how it is to be taken.
        sentence: the judgement.
        evidence: the figures that it rests on.
        advice: what to do; "" where nothing is to be done.
    """

    kind: str
    level: Level
    sentence: str
    evidence: str
    advice: str = ""


LEAST_STEPS = 3
"""Steps that a judgement about all steps of a run needs."""
SMALL_BATCH = 32
"""Rollouts of a step below which its gradient is mostly noise."""
SLOW_REWARD = 0.2
"""Share of the steps' time spent waiting for rewards from which on they are slow."""
_NO_GRADIENT = 1e-10

_ADVICE = {rule.name: rule.advice for rule in RULES}


def problems(run: RunRecords) -> list[Finding]:
    """All problems of a run, the worst first."""
    judges: tuple[Callable[[RunRecords], Iterator[Finding]], ...] = (
        _failed,
        _untrained_export,
        _equal_answers,
        _constant_reward,
        _no_gradient,
        _small_batch,
        _slow_reward,
        _faults,
        _alarms,
    )
    found = [finding for judge in judges for finding in judge(run)]
    if any(finding.kind == "constant_reward" for finding in found):
        found = [one for one in found if one.kind not in {"all_equal", "variance_gone"}]
    return sorted(found, key=lambda one: one.level != "bad")


def _failed(run: RunRecords) -> Iterator[Finding]:
    if run.failure is not None:
        yield Finding(
            "failed",
            "bad",
            "The run failed.",
            run.failure,
            "correct the cause; then the same command continues from the last checkpoint",
        )


def _untrained_export(run: RunRecords) -> Iterator[Finding]:
    if why := run.summary.get(UNTRAINED_EXPORT):
        yield Finding(
            UNTRAINED_EXPORT,
            "bad",
            "The export is the model before training.",
            why,
            "look at the answers and their rewards in `rollouts/validation_*.jsonl`",
        )


def _equal_answers(run: RunRecords) -> Iterator[Finding]:
    for entry in run.entries(EVALUATION_NOTICE):
        yield Finding(
            EVALUATION_NOTICE,
            "warning",
            "Before training all answers to a set had the same result.",
            entry["what"],
            "look at these answers, in `rollouts/*_before.jsonl`",
        )


def _constant_reward(run: RunRecords) -> Iterator[Finding]:
    spreads = run.values("reward/std")
    if len(spreads) >= LEAST_STEPS and not any(spread for _, spread in spreads):
        mean = median(value for _, value in run.values("reward/mean"))
        parts = {part: [value for _, value in run.values(f"reward/{part}")] for part in run.parts}
        shown = ", ".join(f"{part} {median(own):.4g}" for part, own in parts.items() if own)
        yield Finding(
            "constant_reward",
            "bad",
            f"The reward is constant, {mean:.4g}: no rollout is better than another, so nothing is "
            "learned.",
            f"in each of {len(spreads)} steps every rollout has the same reward, {mean:.4g}"
            + (f" (by part: {shown})" if shown else ""),
            "try the reward on right and wrong answers: python -m launch.reward CONFIG.toml",
        )


def _no_gradient(run: RunRecords) -> Iterator[Finding]:
    signal = dict(run.values("groups/mixed"))
    steps = [(step, norm) for step, norm in run.values("learner/grad_norm") if signal.get(step)]
    without = [step for step, norm in steps if norm < _NO_GRADIENT]
    if len(without) >= LEAST_STEPS and 2 * len(without) >= len(steps):
        yield Finding(
            "no_gradient",
            "bad",
            "The adapter gets no gradient: rewards differ within groups, but nothing is learned.",
            f"the gradient's norm is 0 in {len(without)} of {len(steps)} steps with mixed groups",
            "check that lora.targets names modules that the model uses and whose weights are not 0",
        )


def _small_batch(run: RunRecords) -> Iterator[Finding]:
    size = run.setting("rollout.group_size")
    kinds = ("mixed", "all_equal", "short")
    groups = [
        sum(row.get(f"groups/{kind}", 0.0) for kind in kinds)
        for row in run.metrics
        if "groups/mixed" in row
    ]
    if size is None or len(groups) < LEAST_STEPS:
        return
    rollouts = median(groups) * size
    if rollouts < SMALL_BATCH:
        yield Finding(
            "small_batch",
            "warning",
            "The batch is tiny: each update follows the noise of a few rollouts.",
            f"{median(groups):g} groups of {size}, {rollouts:g} rollouts in a step "
            f"(fewer than {SMALL_BATCH})",
            "raise rollout.prompts_per_step, and rollout.group_size to at least 4",
        )


def _slow_reward(run: RunRecords) -> Iterator[Finding]:
    total = run.time_use.step_s
    waited = sum(seconds for _, seconds in run.values("time/reward_s"))
    if total and waited > SLOW_REWARD * total:
        yield Finding(
            "slow_reward",
            "warning",
            "The rewards are slow: the devices wait for them.",
            f"the run waits for rewards in {waited / total:.0%} of the steps' time, "
            f"{waited:.1f} s in {run.steps} steps",
            "raise rewards.workers or the part's `workers`, make the function async, or let it do "
            "less; python -m launch.reward shows its time",
        )


def _faults(run: RunRecords) -> Iterator[Finding]:
    skipped = run.entries("update_skipped")
    if skipped:
        yield Finding(
            "skipped_updates",
            "bad",
            f"{len(skipped)} updates were skipped.",
            f"step {skipped[0]['step']}: {skipped[0]['why']}",
            f"read the batch in {skipped[0]['batch']}; a lower learner.lr may help",
        )
    errors = run.entries("reward_errors")
    if errors:
        parts: dict[str, int] = {}
        for entry in errors:
            parts[entry["name"]] = parts.get(entry["name"], 0) + entry["count"]
        yield Finding(
            "reward_errors",
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
        yield Finding(rule, level, sentence, f"{raised}: {fact}", _ADVICE[rule])
