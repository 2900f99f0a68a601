"""The verdict on a run in words: does it learn, is it healthy, what bounds it, what to try next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy.stats import kendalltau, theilslopes

from pipeline.deadline import show_duration
from pipeline.evaluate.significance import LEVEL
from pipeline.evaluate.summary import mean_of, metric_title, prompts_of, show_change
from pipeline.run.goodput import STEP_PHASES, TimeUse, grouped, phase_seconds, summed
from pipeline.run.record_files import DamagedFileError
from pipeline.run.report.curves import thin
from pipeline.run.report.findings import LEAST_STEPS, Finding, Level, problems
from pipeline.run.report.paired import paired_change
from pipeline.run.report.run_records import Row, RunRecords
from pipeline.run.status import phase_words

_MOSTLY = 0.5
"""Share of the steps' time from which on one use of it bounds the run."""
_NOTABLE = 0.15
_MOST_COMPARED = 1000

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
        "more rewards.workers, an async function, or one that does less",
    ),
    "evaluation, records": (
        "evaluation, checkpoints and coordination",
        "larger eval.every_steps and checkpoint.every_steps, or a limit for data.validation",
    ),
}
"""What bounds the steps, and advice, by group of phases."""
_START = "a longer run; programs come from the cache at the next start"
_BEFORE: Mapping[str, str] = {
    "device_wait": "other runs held the devices; `ray list actors` names them",
    "evaluation": "a limit for data.test and data.validation",
}
"""Advice, by the phase that took most of the time before the first step."""


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
            return Finding("health", "good", "No problem was found.", "no alarm, no fault")
        worst = self.problems[0]
        count = len(self.problems)
        many = "1 problem" if count == 1 else f"{count} problems"
        return Finding("health", worst.level, f"{many}. {worst.sentence}", worst.evidence)


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
    return _paired(run, [*before[-1:], *after[-1:]])


def _validation_change(run: RunRecords) -> Row | None:
    found = run.evaluations("validation")
    return _paired(run, [found[0], found[-1]]) if len(found) > 1 else None


def _paired(run: RunRecords, evaluated: Sequence[Row]) -> dict[str, Any] | None:
    if len(evaluated) != 2:
        return None
    try:
        before, after = (run.rollouts(one["file"]) for one in evaluated)
    except DamagedFileError:
        return None
    return paired_change(before, after, summary=evaluated[0])


def _judged_change(name: str, change: Row) -> Finding:
    before, after, interval = change["before"], change["after"], change["paired_ci95"]
    low, high = interval or (0.0, 0.0)
    metric = metric_title(after)
    level: Level = "good" if low > 0 else "bad" if high < 0 else "note"
    answer = {
        "good": f"Yes: the {name} {metric} rose.",
        "bad": f"No: the {name} {metric} fell.",
        "note": f"Not shown: the {name} {metric} may not have changed.",
    }[level]
    n = change.get("paired_n", prompts_of(after))
    return Finding(
        "learning",
        level,
        answer,
        f"{show_change(before, after, change)} on {n} prompts, paired p = {change['paired_p']:.1e}",
    )


def _trend(run: RunRecords) -> Finding:
    """The trend of the mean reward, or of the loss of demonstrations.

    Theil-Sen slope with its interval, and Mann-Kendall's test:
    P. K. Sen, J. Am. Stat. Assoc. 63 (1968), 1379-1389; H. B. Mann, Econometrica 13 (1945),
    245-259. Neither assumes a distribution; both take steps as independent.
    """
    name, better, points = "mean reward", 1, run.values("reward/mean")
    if not points:
        name, better, points = "loss of demonstrations", -1, run.values("sft/loss")
    if len(points) < LEAST_STEPS:
        known = f"{len(points)} steps with a {name}"
        return Finding("learning", "note", "Not known yet: too few steps.", known)
    # All pairs of points are compared: means of neighbours take their place in long runs.
    steps, values = zip(*thin(points, most=_MOST_COMPARED), strict=True)
    slope, _, low, high = theilslopes(values, steps, alpha=LEVEL)
    p = kendalltau(steps, values).pvalue
    clear = p < 1 - LEVEL
    gain = better * slope if clear else 0.0
    level: Level = "good" if gain > 0 else "bad" if gain < 0 else "note"
    answer = {
        "good": f"It seems so: the {name} {'rises' if slope > 0 else 'falls'}.",
        "bad": f"No: the {name} {'rises' if slope > 0 else 'falls'}.",
        "note": f"Not shown: the {name} has no clear trend.",
    }[level]
    return Finding(
        "learning",
        level,
        answer,
        f"{name} {100 * slope:+.3g} [{100 * low:+.3g}, {100 * high:+.3g}] in 100 steps, "
        f"p = {p:.1e} over {len(points)} steps; no evaluation after training to compare with",
        "set eval.every_steps and data.validation to measure it on prompts of their own",
    )


def bound(run: RunRecords) -> Finding:
    """What the time of the steps is used for, as the driver sees it."""
    use = run.time_use
    steps = [phase_seconds(row) for row in run.metrics]
    # What else the first row has was before the first step.
    steps[:1] = [{phase: row.get(phase, 0.0) for phase in STEP_PHASES} for row in steps[:1]]
    seconds = summed(steps)
    groups = {group: value for group, value in grouped(seconds).items() if group in _BOUND}
    total = sum(groups.values())
    if not total:
        return Finding("bound", "note", "Not known: no step has ended.", "no time of a step")
    shares = sorted(((value / total, group) for group, value in groups.items()), reverse=True)
    share, largest = shares[0]
    name, advice = _BOUND[largest]
    others = [f"{_BOUND[group][0]} {part:.0%}" for part, group in shares if part >= 0.005]
    mostly = "Bound by" if share >= _MOSTLY else "Mostly bound by"
    details = [", ".join(others), *_wasted(use.devices)]
    if (before := _before_training(use)) is not None:
        sentence = f"{before.sentence} The steps: {mostly.lower()} {name}."
        evidence = "; ".join([before.evidence, f"of the steps: {details[0]}", *details[1:]])
        return replace(before, sentence=sentence, evidence=evidence)
    return Finding("bound", "note", f"{mostly} {name}.", "; ".join(details), advice)


def _before_training(use: TimeUse) -> Finding | None:
    """What the time before the first step was used for, if that is most of the run's time."""
    ends = (at for at, one in enumerate(use.intervals, start=1) if one.step is not None)
    seconds = summed(one.seconds for one in use.intervals[: next(ends, None)])
    spent = {phase: value for phase, value in seconds.items() if phase not in STEP_PHASES}
    total = sum(spent.values())
    if total <= _MOSTLY * use.wall_s:
        return None
    words = {phase: phase_words(phase) for phase in spent}
    largest = sorted(spent.items(), key=lambda one: one[1], reverse=True)
    shown = [f"{words[phase]} {show_duration(value)}" for phase, value in largest if value >= 1]
    first = largest[0][0]
    return Finding(
        "bound",
        "note",
        f"Most of the time lies before the first step: {words[first]}.",
        f"{total / use.wall_s:.0%} of the run's time: {', '.join(shown)}",
        _BEFORE.get(first, _START),
    )


def _wasted(devices: Mapping[str, float]) -> Iterator[str]:
    """Idle slots of the samplers and padding of the learner, where they are notable."""
    for useful, spare, words in (
        ("decode", "empty slots", "of the decode time is idle slots"),
        ("update", "padding", "of the update is padding"),
    ):
        lost = devices.get(spare, 0.0)
        whole = lost + devices.get(useful, 0.0)
        if whole and lost / whole >= _NOTABLE:
            yield f"{lost / whole:.0%} {words}"


def _next(
    run: RunRecords, learns: Finding, found: Sequence[Finding], bounding: Finding
) -> Iterator[str]:
    yield from dict.fromkeys(finding.advice for finding in found if finding.advice)
    if not found and learns.level == "good" and run.summary and _still_rising(run):
        yield "validation was best at the end: continue with --extend"
    if not found and learns.level != "good" and run.steps >= LEAST_STEPS:
        yield "a higher learner.lr, more prompts_per_step, or more steps"
    if learns.advice:
        yield learns.advice
    if bounding.advice:
        yield f"for speed: {bounding.advice}"


def _still_rising(run: RunRecords) -> bool:
    means = [mean_of(one) or 0.0 for one in run.evaluations("validation")]
    return len(means) > 1 and means[-1] == max(means)
