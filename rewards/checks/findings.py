"""Findings of a trial: what is wrong with the reward functions, and what to do about it.

A finding that `fails` makes the check fail: the reference is not on top of the weighted sum, a part
has errors, or a case of the user has another score. The others are for the user to judge.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rewards.base import Outcome
from rewards.checks.probes import EMPTY, REFERENCE, SPACE, Kind
from rewards.checks.trial import Scored, Trial

SLOW_STEP_S = 30.0
"""Forecast seconds of a step's scores above which a part is called slow."""
_TOLERANCE = 1e-9
_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, what to do about it, and whether the check fails.

    `examples` are completions that show it, one line each.
    """

    kind: str
    what: str
    advice: str
    fails: bool = False
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


def find(trial: Trial, *, rollouts_per_step: int) -> list[Finding]:
    """All findings of a trial, those that fail first.

    Without reference answers the findings that compare with them are not made.
    """
    found = [
        *_errors(trial),
        *_ranking(trial),
        *_leading_space(trial),
        *_empty_beats_wrong(trial),
        *_without_information(trial),
        *_unstable(trial),
        *_slow(trial, rollouts_per_step),
    ]
    return sorted(found, key=lambda finding: not finding.fails)


def _errors(trial: Trial) -> Iterator[Finding]:
    for name in trial.weights:
        counts, first = Counter[str](), dict[str, str]()
        for one in trial.scored:
            error = one.outcomes[name].error
            if error is not None:
                counts[error.cause] += 1
                first.setdefault(error.cause, f"{one.probe.name!r}: {error.message}")
        for cause, count in counts.most_common():
            yield Finding(
                "errors",
                fails=True,
                what=f"{name!r}: {count} of {len(trial.scored)} completions have no score "
                f"({cause}), first {first[cause]}",
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
    totals = [one.total for one in trial.scored if one.total is not None]
    if _is_constant(totals):
        yield Finding(
            "constant",
            fails=bool(references),
            what="the weighted sum is the same for all completions",
            advice="without differences nothing is learned: look at the parts and their weights; "
            "if right completions have another form, set prompt.answer, or give it with --form",
        )
        return
    compared = defaultdict[tuple[Kind, str], list[Scored]](list)
    for one in trial.scored:
        if one.total is not None and one.probe.row in references:
            compared[one.probe.kind, one.probe.name].append(one)
    examples = defaultdict[Kind, list[tuple[bool, str]]](list)
    for (kind, name), own in compared.items():
        if kind in _RANKING and (shown := _not_below(name, own, references)) is not None:
            examples[kind].append(shown)
    for kind, (label, says, advice) in _RANKING.items():
        found = sorted(examples[kind], key=lambda one: not one[0])
        if found:
            yield Finding(label, says, advice, found[0][0], tuple(text for _, text in found))


def _not_below(
    name: str, own: Sequence[Scored], references: Mapping[int, float]
) -> tuple[bool, str] | None:
    """Whether a probe is not below the reference on average, and in words in which rows.

    None if it is below in all rows. Variants may equal the reference.
    """

    def wins(total: float, reference: float) -> bool:
        slack = _TOLERANCE * max(1.0, abs(total), abs(reference))
        if own[0].probe.kind == "variant":
            return total > reference + slack
        return total >= reference - slack

    pairs = [(one.total or 0.0, references[one.probe.row]) for one in own]
    ids = [
        f"{one.probe.given.prompt_id}" for one, pair in zip(own, pairs, strict=True) if wins(*pair)
    ]
    if not ids:
        return None
    mean, reference = map(fmean, zip(*pairs, strict=True))
    where = f"in {len(ids)} of {len(own)} rows"
    if len(ids) < len(own):
        where += f", prompts {', '.join(ids[:_SHOWN])}{', ...' if len(ids) > _SHOWN else ''}"
    return wins(mean, reference), f"{name!r}: {mean:.3g} against {reference:.3g}, {where}"


def _leading_space(trial: Trial) -> Iterator[Finding]:
    """The space that a base model writes after a prompt without turns decides the score."""
    bare, spaced = _totals(trial, REFERENCE), _totals(trial, SPACE)
    lowest = defaultdict[int, float](lambda: math.inf)
    for one in trial.scored:
        if one.total is not None:
            lowest[one.probe.row] = min(one.total, lowest[one.probe.row])
    # More than half of what is above the lowest: a length in characters differs as well.
    rows = bare.keys() & spaced.keys()
    differ = [
        row
        for row in rows
        if abs(bare[row] - spaced[row]) > (max(bare[row], spaced[row]) - lowest[row]) / 2
    ]
    if differ:
        yield Finding(
            "leading_space",
            what=f"a space before the reference changes its reward, in {len(differ)} of "
            f"{len(rows)} rows: {fmean(bare[row] for row in differ):.3g} without, "
            f"{fmean(spaced[row] for row in differ):.3g} with it",
            advice="after a prompt without turns a base model often begins with a space: strip "
            "the completion, or use rewards.answers.find_answer; --form ' ANSWER' makes the "
            "form with the space the reference",
        )


def _empty_beats_wrong(trial: Trial) -> Iterator[Finding]:
    empty, wrong = _totals(trial, EMPTY), defaultdict[int, list[float]](list)
    for one in trial.scored:
        if one.probe.kind == "wrong" and one.total is not None and one.probe.row in empty:
            wrong[one.probe.row].append(one.total)
    beaten = {
        row: mean
        for row, totals in wrong.items()
        if empty[row] > (mean := fmean(totals)) + _TOLERANCE * max(1.0, abs(empty[row]))
    }
    if beaten:
        yield Finding(
            "empty_beats_wrong",
            what="no text has a higher reward than a wrong answer: "
            f"{fmean(empty[row] for row in beaten):.3g} against {fmean(beaten.values()):.3g}, in "
            f"{len(beaten)} of {len(wrong)} rows",
            advice="the model learns to say nothing where it is unsure: give an empty completion "
            "the lowest reward, and punish length only above a minimum",
        )


def _without_information(trial: Trial) -> Iterator[Finding]:
    for name in trial.weights:
        outcomes = [one.outcomes[name] for one in trial.scored]
        if all(one.value is None and one.error is None for one in outcomes):
            yield Finding(
                "always_none",
                what=f"{name!r} is None for all completions: it never applies",
                advice="look at the columns and the conditions for which it returns None",
            )
        elif _is_constant([one.value for one in outcomes if one.value is not None]):
            yield Finding(
                "constant_part",
                what=f"{name!r} has the same value for all completions",
                advice="it has no influence on training; remove it, or look for a mistake in it",
            )


def _unstable(trial: Trial) -> Iterator[Finding]:
    """Values of a completion that differ when it is scored alone."""
    for name in trial.weights:
        both = [one for one in trial.scored if name in one.alone]
        differ = [one for one in both if _shown(one.outcomes[name]) != _shown(one.alone[name])]
        if differ:
            first = differ[0]
            yield Finding(
                "unstable",
                what=f"{name!r} has different values in two calls with the same completion, for "
                f"{len(differ)} of {len(both)}, e.g. {first.probe.name!r}: "
                f"{_shown(first.outcomes[name])} with others, {_shown(first.alone[name])} alone",
                advice="a value must depend on its own completion only, which come in any order "
                "and in batches of any size; seed random numbers with the completion, keep no "
                "state between calls",
            )


def _slow(trial: Trial, rollouts_per_step: int) -> Iterator[Finding]:
    for part in trial.rewards.functions:
        workers, seconds = part.workers or trial.rewards.workers, trial.seconds.get(part.name, 0.0)
        calls, parallel = trial.calls[part.name], f"workers = {workers}"
        step_s = rollouts_per_step * seconds / (workers * calls)
        if trial.facts[part.name].kind == "async":
            parallel += f" and concurrency = {calls}"
            how = "a higher concurrency, if its server can take it, or more workers"
        else:
            how = "more workers or, where it waits for a server, write it as async def"
        if step_s > SLOW_STEP_S:
            yield Finding(
                "slow",
                what=f"{part.name!r} takes {seconds:.3g} s a completion: {step_s:,.0f} s for the "
                f"{rollouts_per_step} rollouts of a step, with {parallel}",
                advice=f"scoring overlaps generation, not the update: set {how}",
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
