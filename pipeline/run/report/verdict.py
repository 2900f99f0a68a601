"""The verdict on a run in words: does it learn, is it healthy, what bounds it, what to try next.

What a rule of `pipeline/alarms.py` watches is taken from the alarms in the journal and not
judged again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import linregress, t

from pipeline.alarms import RULES
from pipeline.evaluate.notices import EVALUATION_NOTICE, UNTRAINED_EXPORT
from pipeline.evaluate.significance import LEVEL
from pipeline.evaluate.summary import metric_title, prompts_of, show_change
from pipeline.run.goodput import STEP_PHASES, phase_seconds, summed
from pipeline.run.report.run_records import Row, RunRecords, paired_change

Level = Literal["good", "note", "warning", "bad"]

_LEAST_STEPS = 3
"""Steps that a judgement about all steps of a run needs."""
_MOSTLY = 0.5
"""Share of the steps' time from which on one use of it bounds the run."""
_ADVICE = {rule.name: rule.advice for rule in RULES}
_BOUND: Mapping[str, tuple[Sequence[str], str]] = {
    "rollout generation": (
        ("sample",),
        'more plan.samplers or plan.slots, rollout.ahead = "one", plan.rollout_weights = "int8"',
    ),
    "the update": (
        ("learn",),
        'more plan.learner_devices, larger plan.micro_batch_tokens, rollout.ahead = "one"',
    ),
    "rewards": (
        ("reward",),
        "more rewards.workers, or faster functions: launch.reward shows the time of each",
    ),
    "evaluation, checkpoints and coordination": (
        ("sync", "coordination", "evaluation", "checkpoint", "export", "end"),
        "larger eval.every_steps and checkpoint.every_steps, or a limit for data.validation",
    ),
}
"""What bounds the steps, by name: its phases, and advice."""


@dataclass(frozen=True)
class Finding:
    """A judgement about a run, the figures that it rests on, and what to do, if anything."""

    level: Level
    sentence: str
    evidence: str
    advice: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether a run learns, its problems, what its steps wait for most, and what to try next."""

    learning: Finding
    problems: Sequence[Finding]
    bound: Finding
    next: Sequence[str]

    @property
    def health(self) -> Finding:
        """All problems in a sentence."""
        if not self.problems:
            return Finding("good", "No problem was found.", "no alarm, no fault")
        worst, count = self.problems[0], len(self.problems)
        many = "1 problem" if count == 1 else f"{count} problems"
        return Finding(worst.level, f"{many}. {worst.sentence}", worst.evidence)


def verdict(run: RunRecords) -> Verdict:
    """Judges a run by its records."""
    learns, found, bounding = learning(run), problems(run), bound(run)
    return Verdict(learns, found, bounding, list(_next(run, learns, found, bounding)))


# --- does it learn


def learning(run: RunRecords) -> Finding:
    """Whether the run learns: by the paired change on the test set, or else on the validation set.

    Without two evaluations of either, by the trend of the mean reward over the steps.
    """
    validations = run.evaluations("validation")
    compared = {
        "test": (run.evaluations("test_before"), run.evaluations("test_after")),
        "validation": (validations[:1], validations[1:]),
    }
    for name, (first, last) in compared.items():
        change = paired_change(run, first[-1], run, last[-1]) if first and last else None
        if change is not None and change["paired_difference"] is not None:
            return _judged_change(name, change)
    return _trend(run)


def _judged_change(name: str, change: Row) -> Finding:
    before, after = change["before"], change["after"]
    low, high = change["paired_ci95"] or (0.0, 0.0)
    what = f"the {name} {metric_title(after)}"
    n = change.get("paired_n", prompts_of(after))
    shown = f"{show_change(before, after, change)} on {n} prompts"
    evidence = f"{shown}, paired p = {change['paired_p']:.1e}"
    if low > 0:
        return Finding("good", f"Yes: {what} rose.", evidence)
    if high < 0:
        return Finding("bad", f"No: {what} fell.", evidence)
    return Finding("note", f"Not shown: {what} may not have changed.", evidence)


def _trend(run: RunRecords) -> Finding:
    """The linear trend of the mean reward over the steps, or of the loss of demonstrations."""
    name, better, points = "mean reward", 1, run.values("reward/mean")
    if not points:
        name, better, points = "loss of demonstrations", -1, run.values("sft/loss")
    if len(points) < _LEAST_STEPS:
        known = f"{len(points)} steps with a {name}"
        return Finding("note", "Not known yet: too few steps.", known)
    trend = linregress(*zip(*points, strict=True))
    reach = trend.stderr * t.ppf((1 + LEVEL) / 2, len(points) - 2)
    slope, low, high = (100 * (trend.slope + side * reach) for side in (0, -1, 1))
    evidence = f"{name} {slope:+.3g} [{low:+.3g}, {high:+.3g}] in 100 steps; no evaluation after"
    advice = "set eval.every_steps and data.validation to measure it on prompts of their own"
    if low <= 0 <= high:
        return Finding("note", f"Not shown: the {name} has no clear trend.", evidence, advice)
    direction = "rises" if slope > 0 else "falls"
    if slope * better > 0:
        return Finding("good", f"It seems so: the {name} {direction}.", evidence, advice)
    return Finding("bad", f"No: the {name} {direction}.", evidence, advice)


# --- is it healthy


def problems(run: RunRecords) -> list[Finding]:
    """All problems of a run, the worst first."""
    return sorted([*_faults(run), *_alarms(run)], key=lambda one: one.level != "bad")


def _faults(run: RunRecords) -> Iterator[Finding]:
    if run.failure is not None:
        advice = "correct the cause; then the same command continues from the last checkpoint"
        yield Finding("bad", "The run failed.", run.failure, advice)
    if why := run.summary.get(UNTRAINED_EXPORT):
        advice = "look at the answers and their rewards in `rollouts/validation_*.jsonl`"
        yield Finding("bad", "The export is the model before training.", why, advice)
    for entry in run.entries(EVALUATION_NOTICE):
        sentence = "Before training all answers to a set had the same result."
        advice = "look at these answers, in `rollouts/*_before.jsonl`"
        yield Finding("warning", sentence, entry["what"], advice)
    if skipped := run.entries("update_skipped"):
        first = f"the first in step {skipped[0]['step']}: {skipped[0]['why']}"
        advice = f"read the batch in {skipped[0]['batch']}; a lower learner.lr may help"
        yield Finding("bad", "Updates were skipped.", f"{len(skipped)} in all, {first}", advice)
    if errors := run.entries("reward_errors"):
        count = sum(entry["count"] for entry in errors)
        sentence = f"Rewards failed {count} times; these rollouts are excluded."
        first = f"the first, of {errors[0]['name']}: {errors[0]['first']}"
        yield Finding("warning", sentence, first, "rewards.log has the tracebacks")


def _alarms(run: RunRecords) -> Iterator[Finding]:
    """A finding for each rule that raised alarms."""
    by_rule: dict[str, list[Row]] = {}
    for entry in run.entries("alarm"):
        by_rule.setdefault(entry["rule"], []).append(entry)
    for rule, alarms in by_rule.items():
        last, steps = alarms[-1], ", ".join(str(entry["step"]) for entry in alarms)
        fact = last["fact"]
        level: Level = "bad" if last.get("action") == "stop" else "warning"
        raised = f"alarm {rule} at step {steps}: {fact}"
        # A run of an earlier version may have rules that are gone.
        advice = _ADVICE.get(rule, "")
        yield Finding(level, f"{fact[:1].upper()}{fact[1:]}.", raised, advice)


# --- what bounds it, and what to try next


def bound(run: RunRecords) -> Finding:
    """What the time of the steps is used for, as the driver sees it."""
    steps = [phase_seconds(row) for row in run.metrics]
    # What else the first row has was before the first step.
    steps[:1] = [{phase: row.get(phase, 0.0) for phase in STEP_PHASES} for row in steps[:1]]
    seconds = summed(steps)
    uses = {
        name: sum(seconds.get(phase, 0.0) for phase in phases)
        for name, (phases, _) in _BOUND.items()
    }
    total = sum(uses.values())
    if not total:
        return Finding("note", "Not known: no step has ended.", "no time of a step")
    shares = sorted(((value / total, name) for name, value in uses.items()), reverse=True)
    share, largest = shares[0]
    most = "Bound by" if share >= _MOSTLY else "Bound most by"
    evidence = ", ".join(f"{name} {part:.0%}" for part, name in shares if part >= 0.005)
    return Finding("note", f"{most} {largest}.", evidence, _BOUND[largest][1])


def _next(
    run: RunRecords, learns: Finding, found: Sequence[Finding], bounding: Finding
) -> Iterator[str]:
    yield from dict.fromkeys(finding.advice for finding in found if finding.advice)
    validations = run.evaluations("validation")
    rises = len(validations) > 1 and run.best_validation == validations[-1]
    if not found and learns.level == "good" and run.summary and rises:
        yield "validation was best at the end: continue with --extend"
    if not found and learns.level != "good" and run.steps >= _LEAST_STEPS:
        yield "a higher learner.lr, more prompts_per_step, or more steps"
    if learns.advice:
        yield learns.advice
    if bounding.advice:
        yield f"for speed: {bounding.advice}"
