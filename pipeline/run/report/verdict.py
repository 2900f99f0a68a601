"""The verdict on a run in words: does it learn, is it healthy, what bounds it, what to try next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import linregress, t

from pipeline.evaluate.significance import LEVEL
from pipeline.evaluate.summary import metric_title, prompts_of, show_change
from pipeline.run.goodput import STEP_PHASES, grouped, phase_seconds, summed
from pipeline.run.report.findings import LEAST_STEPS, Finding, Level, problems
from pipeline.run.report.run_records import Row, RunRecords, paired_change

_MOSTLY = 0.5
"""Share of the steps' time from which on one use of it bounds the run."""

_BOUND: Mapping[str, tuple[str, str]] = {
    "rollouts": (
        "rollout generation",
        (
            'more plan.samplers or plan.slots; rollout.ahead = "one" generates during the update; '
            'plan.rollout_weights = "int8"; rollout.cut_off ends the slowest rollouts of a step'
        ),
    ),
    "update": (
        "the update",
        (
            "more devices for the learner (plan.learner_devices), larger plan.micro_batch_tokens; "
            'rollout.ahead = "one" generates the next rollouts meanwhile'
        ),
    ),
    "rewards": (
        "rewards",
        "more rewards.workers, a higher concurrency of an async function, or one that does less",
    ),
    "evaluation, records": (
        "evaluation, checkpoints and coordination",
        "larger eval.every_steps and checkpoint.every_steps, or a limit for data.validation",
    ),
}
"""What bounds the steps, and advice, by group of phases."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of a run.

    Attributes:
        learning: whether it learns.
        problems: the worst first; none: it is healthy.
        bound: what most of the steps' time is used for.
        next: what to try, the most important first.
    """

    learning: Finding
    problems: Sequence[Finding]
    bound: Finding
    next: Sequence[str]

    @property
    def health(self) -> Finding:
        """All problems in a sentence."""
        if not self.problems:
            return Finding("good", "No problem was found.", "no alarm, no fault")
        worst = self.problems[0]
        count = len(self.problems)
        many = "1 problem" if count == 1 else f"{count} problems"
        return Finding(worst.level, f"{many}. {worst.sentence}", worst.evidence)


def verdict(run: RunRecords) -> Verdict:
    """Judges a run by its records."""
    learns, found, bounding = learning(run), problems(run), bound(run)
    return Verdict(learns, found, bounding, list(_next(run, learns, found, bounding)))


def learning(run: RunRecords) -> Finding:
    """Whether the run learns.

    By the first that exists: the paired change of the test accuracy before and after; that of the
    first and the last validation; the trend of the mean reward over the steps.
    """
    for name, change in (("test", _test_change(run)), ("validation", _validation_change(run))):
        if change is not None and change["paired_difference"] is not None:
            return _judged_change(name, change)
    return _trend(run)


def _test_change(run: RunRecords) -> Row | None:
    recorded = run.summary.get("eval", {})
    if "paired_difference" in recorded:
        return recorded
    before, after = (run.evaluations(f"test_{when}") for when in ("before", "after"))
    return paired_change(run, before[-1], run, after[-1]) if before and after else None


def _validation_change(run: RunRecords) -> Row | None:
    found = run.evaluations("validation")
    return paired_change(run, found[0], run, found[-1]) if len(found) > 1 else None


def _judged_change(name: str, change: Row) -> Finding:
    before, after, interval = change["before"], change["after"], change["paired_ci95"]
    low, high = interval or (0.0, 0.0)
    metric = metric_title(after)
    level, answer = _judged(
        max(low, 0.0) + min(high, 0.0),
        good=f"Yes: the {name} {metric} rose.",
        bad=f"No: the {name} {metric} fell.",
        note=f"Not shown: the {name} {metric} may not have changed.",
    )
    n = change.get("paired_n", prompts_of(after))
    return Finding(
        level,
        answer,
        f"{show_change(before, after, change)} on {n} prompts, paired p = {change['paired_p']:.1e}",
    )


def _trend(run: RunRecords) -> Finding:
    """The linear trend of the mean reward over the steps, or of the loss of demonstrations."""
    name, better, points = "mean reward", 1, run.values("reward/mean")
    if not points:
        name, better, points = "loss of demonstrations", -1, run.values("sft/loss")
    if len(points) < LEAST_STEPS:
        known = f"{len(points)} steps with a {name}"
        return Finding("note", "Not known yet: too few steps.", known)
    trend = linregress(*zip(*points, strict=True))
    reach = trend.stderr * t.ppf((1 + LEVEL) / 2, len(points) - 2)
    gain = better * trend.slope if abs(trend.slope) > reach else 0.0
    direction = "rises" if trend.slope > 0 else "falls"
    level, answer = _judged(
        gain,
        good=f"It seems so: the {name} {direction}.",
        bad=f"No: the {name} {direction}.",
        note=f"Not shown: the {name} has no clear trend.",
    )
    slope, low, high = (100 * (trend.slope + side * reach) for side in (0, -1, 1))
    return Finding(
        level,
        answer,
        f"{name} {slope:+.3g} [{low:+.3g}, {high:+.3g}] in 100 steps over {len(points)} steps; "
        "no evaluation after training to compare with",
        "set eval.every_steps and data.validation to measure it on prompts of their own",
    )


def _judged(gain: float, *, good: str, bad: str, note: str) -> tuple[Level, str]:
    """Level and sentence by the sign of a gain; 0: it is not clear."""
    return ("good", good) if gain > 0 else ("bad", bad) if gain < 0 else ("note", note)


def bound(run: RunRecords) -> Finding:
    """What the time of the steps is used for, as the driver sees it."""
    steps = [phase_seconds(row) for row in run.metrics]
    # What else the first row has was before the first step.
    steps[:1] = [{phase: row.get(phase, 0.0) for phase in STEP_PHASES} for row in steps[:1]]
    groups = {group: value for group, value in grouped(summed(steps)).items() if group in _BOUND}
    total = sum(groups.values())
    if not total:
        return Finding("note", "Not known: no step has ended.", "no time of a step")
    shares = sorted(((value / total, group) for group, value in groups.items()), reverse=True)
    share, largest = shares[0]
    name, advice = _BOUND[largest]
    others = [f"{_BOUND[group][0]} {part:.0%}" for part, group in shares if part >= 0.005]
    mostly = "Bound by" if share >= _MOSTLY else "Mostly bound by"
    return Finding("note", f"{mostly} {name}.", ", ".join(others), advice)


def _next(
    run: RunRecords, learns: Finding, found: Sequence[Finding], bounding: Finding
) -> Iterator[str]:
    yield from dict.fromkeys(finding.advice for finding in found if finding.advice)
    validations = run.evaluations("validation")
    rises = len(validations) > 1 and run.best_validation == validations[-1]
    if not found and learns.level == "good" and run.summary and rises:
        yield "validation was best at the end: continue with --extend"
    if not found and learns.level != "good" and run.steps >= LEAST_STEPS:
        yield "a higher learner.lr, more prompts_per_step, or more steps"
    if learns.advice:
        yield learns.advice
    if bounding.advice:
        yield f"for speed: {bounding.advice}"
