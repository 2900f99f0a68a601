"""Findings of a trial: what is wrong with the reward functions, and what to do about it.

A finding that `fails` makes the check fail: the reference is not on top of the weighted sum, a part
has errors. The others are for the user to judge.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewards.base import Outcome
from rewards.checks.probes import EMPTY, REFERENCE, Kind
from rewards.checks.trial import Trial

_TOLERANCE = 1e-9
_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: one of the kinds below, or "references".
        fails: whether the check fails.
        what: what was found, with names and numbers.
        advice: what to do.
        examples: completions that show it, one line each.
    """

    kind: str
    fails: bool
    what: str
    advice: str
    examples: tuple[str, ...] = ()


_RANKING: Mapping[Kind, tuple[str, str, str]] = {
    "variant": (
        "reference_not_best",
        "other forms of the right answer have a higher reward than the reference",
        "reward the expected form, or set prompt.answer, or its tags, to the form that is rewarded",
    ),
    "wrong": (
        "wrong_answer",
        "wrong answers have at least the reward of the reference",
        "compare all of the answer (find_answer, same_answer); raise the weight of what does",
    ),
    "hack": (
        "hack",
        "known reward hacks have at least the reward of the reference",
        "extract one answer (rewards.answers.find_answer); bound what tags and length can earn",
    ),
    "noise": (
        "noise",
        "completions without an answer have at least the reward of the reference",
        "bound what length and format can earn below the reward of the right answer",
    ),
}
"""Kind of the finding, what it says, and the advice, by kind of probe."""


def find(trial: Trial) -> list[Finding]:
    """All findings of a trial, those that fail first.

    Without reference answers the findings that compare with them are not made.
    """
    found = [
        *_errors(trial),
        *_ranking(trial),
        *_empty_beats_wrong(trial),
        *_without_information(trial),
        *_repetition(trial),
    ]
    return sorted(found, key=lambda finding: not finding.fails)


def _errors(trial: Trial) -> Iterator[Finding]:
    for name in trial.weights:
        errors = [
            (scored.probe.name, scored.outcomes[name].error)
            for scored in trial.scored
            if scored.outcomes[name].error is not None
        ]
        causes = Counter(error.cause for _, error in errors if error is not None)
        for cause, count in causes.most_common():
            probe, first = next(
                (probe, error)
                for probe, error in errors
                if error is not None and error.cause == cause
            )
            yield Finding(
                "errors",
                fails=True,
                what=f"{name!r}: {count} of {len(trial.scored)} completions have no score "
                f"({cause}), first {probe!r}: {first.message}",
                advice="an error excludes the rollout: return 0 for a bad completion, None where "
                "the part does not apply; --log FILE writes tracebacks",
            )


def _ranking(trial: Trial) -> Iterator[Finding]:
    """Compares the weighted sum of every probe with that of its row's reference."""
    references = _totals(trial, REFERENCE)
    rows = {one.probe.row for one in trial.scored if one.probe.name == REFERENCE}
    missing = len(rows) - len(references)
    if missing:
        yield Finding(
            "no_reward",
            fails=True,
            what=f"the reference has no weighted sum in {missing} of {len(rows)} rows: parts "
            "failed, do not apply, or their sum is not finite",
            advice="a rollout without a reward is not trained on; at least one weighted part must "
            "apply to a right answer",
        )
    if _is_constant([one.total for one in trial.scored if one.total is not None]):
        yield Finding(
            "constant",
            fails=bool(references),
            what="the weighted sum is the same for all completions",
            advice="without differences nothing is learned: look at the parts and their weights; "
            "if right completions have another form, set prompt.answer, or give it with --form",
        )
        return
    names = dict.fromkeys((one.probe.kind, one.probe.name) for one in trial.scored)
    above: dict[Kind, list[tuple[bool, str]]] = {}
    for kind, name in names:
        found = _compared(trial, kind, name, references) if kind in _RANKING else None
        if found is not None:
            above.setdefault(kind, []).append(found)
    lowest = min((one.total for one in trial.scored if one.total is not None), default=0.0)
    if "variant" in above and all(total <= lowest for total in references.values()):
        # Another form is rewarded, and the expected one is not: all else would be named, too.
        above = {"variant": above["variant"]}
    for kind, (label, says, advice) in _RANKING.items():
        if kind in above:
            fails = any(fails for fails, _ in above[kind])
            shown = tuple(text for _, text in sorted(above[kind], key=lambda one: not one[0]))
            yield Finding(label, fails, says, advice, shown)


def _compared(
    trial: Trial, kind: Kind, name: str, references: Mapping[int, float]
) -> tuple[bool, str] | None:
    """Whether a probe is not below the reference on average, and in words where; None: below.

    Variants may be equal to the reference.
    """
    own = [one for one in trial.scored if (one.probe.kind, one.probe.name) == (kind, name)]
    totals = {
        one.probe.row: one.total
        for one in own
        if one.total is not None and one.probe.row in references
    }
    if not totals:
        return None
    may_equal = kind == "variant"

    def wins(total: float, reference: float) -> bool:
        slack = _TOLERANCE * max(1.0, abs(total), abs(reference))
        return total > reference + slack if may_equal else total >= reference - slack

    rows = [row for row, total in totals.items() if wins(total, references[row])]
    if not rows:
        return None
    mean = statistics.fmean(totals.values())
    reference = statistics.fmean(references[row] for row in totals)
    ids = {one.probe.row: one.probe.given.prompt_id for one in own}
    where = f"in {len(rows)} of {len(totals)} rows"
    if len(rows) < len(totals):
        more = ", ..." if len(rows) > _SHOWN else ""
        where += f", prompts {', '.join(f'{ids[row]}' for row in rows[:_SHOWN])}{more}"
    text = f"{name!r} ({own[0].probe.what}): {mean:.3g} against {reference:.3g}, {where}"
    return wins(mean, reference), text


def _empty_beats_wrong(trial: Trial) -> Iterator[Finding]:
    empty, wrong = _totals(trial, EMPTY), dict[int, list[float]]()
    for one in trial.scored:
        if one.probe.kind == "wrong" and one.total is not None and one.probe.row in empty:
            wrong.setdefault(one.probe.row, []).append(one.total)
    beaten = {
        row: statistics.fmean(totals)
        for row, totals in wrong.items()
        if empty[row] > statistics.fmean(totals) + _TOLERANCE * max(1.0, abs(empty[row]))
    }
    if beaten:
        mean = statistics.fmean(empty[row] for row in beaten)
        yield Finding(
            "empty_beats_wrong",
            fails=False,
            what=f"no text has a higher reward than a wrong answer: {mean:.3g} against "
            f"{statistics.fmean(beaten.values()):.3g}, in {len(beaten)} of {len(wrong)} rows",
            advice="the model learns to say nothing where it is unsure: give an empty completion "
            "the lowest reward, and punish length only above a minimum",
        )


def _without_information(trial: Trial) -> Iterator[Finding]:
    for name in trial.weights:
        outcomes = [one.outcomes[name] for one in trial.scored]
        applying = [one for one in outcomes if one.value is not None or one.error is not None]
        if not applying:
            yield Finding(
                "always_none",
                fails=False,
                what=f"{name!r} is None for all completions: it never applies",
                advice="look at the columns and the conditions for which it returns None",
            )
        elif _is_constant([one.value for one in outcomes if one.value is not None]):
            yield Finding(
                "constant_part",
                fails=False,
                what=f"{name!r} has the same value for all completions",
                advice="it has no influence on training; remove it, or look for a mistake in it",
            )


def _repetition(trial: Trial) -> Iterator[Finding]:
    """Values that differ between calls with the same completion."""
    for name, repeated in trial.repeated.items():
        unstable = [one for one in repeated if _shown(one.first) != _shown(one.again)]
        if unstable:
            one = unstable[0]
            yield Finding(
                "unstable",
                fails=False,
                what=f"{name!r} has different values for a completion in two calls, with other "
                f"completions around it, for {len(unstable)} of {len(repeated)}, e.g. "
                f"{one.probe.name!r}: {_shown(one.first)}, then {_shown(one.again)}",
                advice="a value must depend on its own completion only: compare it with no other, "
                "keep no state between calls, seed random numbers with the completion",
            )


def _totals(trial: Trial, name: str) -> dict[int, float]:
    """Weighted sums of a probe by row."""
    return {
        one.probe.row: one.total
        for one in trial.scored
        if one.probe.name == name and one.total is not None
    }


def _is_constant(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) == max(values)


def _shown(outcome: Outcome) -> str:
    """The exact value of an outcome, or its cause."""
    if outcome.error is not None:
        return outcome.error.cause
    return f"{outcome.value!r}" + (f" {dict(outcome.named)}" if outcome.named else "")
