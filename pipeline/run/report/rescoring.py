"""The report on recorded rollouts that were scored again with other reward functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from configs.task import AnswerPlace
from pipeline.rollout.scoring import SUM
from pipeline.tables import table
from rewards.answers import find_answer, is_correct
from rewards.base import RewardError, RewardInput

Figures = Mapping[str, Any]
_QUANTILES = {"q05": 0.05, "q50": 0.5, "q95": 0.95}
_LONGEST_PROMPT, _LONGEST_TEXT = 300, 800
_DIFFERENCE = 1e-9
"""Smaller differences of rewards are rounding."""


@dataclass(frozen=True)
class Rescored:
    """A recorded rollout with its rewards before and after.

    Attributes:
        step: that started it.
        sample: its number in the group.
        given: input of the reward functions.
        before: recorded values of the parts and the numbers that they return by name, and the
            weighted sum as `SUM`; None: no value.
        after: the same, scored again.
        errors: of parts, and of the weighted sum, that failed when scored again.
    """

    step: int
    sample: int
    given: RewardInput
    before: Mapping[str, float | None]
    after: Mapping[str, float | None]
    errors: Mapping[str, RewardError]


def rescoring_figures(
    rollouts: Sequence[Rescored], *, extraction: AnswerPlace, show: int
) -> dict[str, Any]:
    """All figures of the report, as JSON.

    Args:
        rollouts: scored again.
        extraction: `eval.extraction`, which says which answers are wrong.
        show: maximum number of completions of each kind.
    """
    by_prompt: dict[tuple[int, int], list[Rescored]] = {}
    for one in rollouts:
        by_prompt.setdefault((one.step, one.given.prompt_id), []).append(one)
    groups = list(by_prompt.values())
    names = dict.fromkeys(name for one in rollouts for name in (*one.after, *one.before))
    names[SUM] = names.pop(SUM)  # the last row
    scored = [one for one in rollouts if one.after[SUM] is not None]
    scored.sort(key=lambda one: one.after[SUM] or 0.0)
    return {
        "rollouts": len(rollouts),
        "groups": len(groups),
        "steps": sorted({one.step for one in rollouts}),
        "parts": {
            name: {
                "before": _distribution([one.before.get(name) for one in rollouts]),
                "after": _distribution([one.after.get(name) for one in rollouts]),
            }
            for name in names
        },
        "groups_with_signal": {
            "before": _signal([[one.before[SUM] for one in group] for group in groups]),
            "after": _signal([[one.after[SUM] for one in group] for group in groups]),
        },
        "rank_correlation": _rank_correlation(groups),
        "best": [_sample(one, extraction) for one in scored[::-1][:show]],
        "worst": [_sample(one, extraction) for one in scored[:show]],
        "wrong": _wrong(scored[::-1], extraction, show=show),
        "errors": _errors(rollouts),
    }


def rescoring_lines(figures: Figures) -> Iterator[str]:
    """The lines of the report."""
    yield f"{figures['rollouts']} rollouts in {figures['groups']} groups, scored again"
    yield ""
    heads = ("n", "mean", "std", *_QUANTILES, "lowest", "highest")
    rows = [["reward", "", *heads, ""]]
    for name, found in figures["parts"].items():
        for when, one in found.items():
            cells = ["-" if one.get(head) is None else f"{one[head]:.4g}" for head in heads]
            rows.append([name if when == "before" else "", when, *cells, ""])
    yield from table(rows)
    yield ""
    signal, ranks = figures["groups_with_signal"], figures["rank_correlation"]
    yield (
        f"groups with signal (rewards that differ): {signal['before']:.1%} before, "
        f"{signal['after']:.1%} after"
    )
    if ranks["mean"] is not None:
        yield (
            f"rank correlation within groups (Spearman): {ranks['mean']:.3f}, mean of "
            f"{ranks['groups']} groups with signal before and after"
        )
    for kind, title in (("best", "highest reward"), ("worst", "lowest reward")):
        for sample in figures[kind]:
            yield from ("", *_sample_lines(sample, title))
    yield from _wrong_lines(figures["wrong"])
    for error in figures["errors"]:
        what = f"{error['part']!r}: {error['count']} rollouts have no score ({error['cause']})"
        yield from ("", f"ERROR: {what}, first: {error['first']}")


def _wrong_lines(wrong: Figures) -> Iterator[str]:
    if not wrong["count"]:
        return
    median = wrong["median_of_right"]
    yield ""
    if median is None:
        yield f"{wrong['count']} rollouts have a wrong answer, none has a right one"
    else:
        yield (
            f"{wrong['high']} of {wrong['count']} rollouts with a wrong answer have at least the "
            f"median reward of right ones ({_number(median)})"
        )
    for sample in wrong["samples"]:
        yield from ("", *_sample_lines(sample, "high reward, wrong answer"))


def _distribution(values: Sequence[float | None]) -> dict[str, float | None]:
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return {"n": 0}
    quantiles = np.quantile(known, list(_QUANTILES.values())).tolist()
    return {
        "n": len(known),
        "mean": float(known.mean()),
        "std": float(known.std()),
        **dict(zip(_QUANTILES, quantiles, strict=True)),
        "lowest": float(known.min()),
        "highest": float(known.max()),
    }


def _signal(groups: Sequence[Sequence[float | None]]) -> float:
    """Share of groups whose rewards differ."""
    known = ([value for value in group if value is not None] for group in groups)
    mixed = [len(values) > 1 and max(values) - min(values) > _DIFFERENCE for values in known]
    return sum(mixed) / max(1, len(mixed))


def _rank_correlation(groups: Sequence[Sequence[Rescored]]) -> dict[str, Any]:
    """Mean of the groups with signal among the rollouts that have a reward before and after."""
    found = []
    for group in groups:
        pairs = [
            (was, now)
            for one in group
            if (was := one.before[SUM]) is not None and (now := one.after[SUM]) is not None
        ]
        before, after = np.array(pairs, float).reshape(-1, 2).T
        if len(pairs) > 1 and min(np.ptp(before), np.ptp(after)) > _DIFFERENCE:
            found.append(np.corrcoef(rankdata(before), rankdata(after))[0, 1])
    return {"mean": float(np.mean(found)) if found else None, "groups": len(found)}


def _wrong(scored: Sequence[Rescored], extraction: AnswerPlace, *, show: int) -> dict[str, Any]:
    """Rollouts with a wrong answer and a high reward: at least the median of right ones.

    Args:
        scored: the highest reward first.
        extraction: see `rescoring_figures`.
        show: maximum number of completions.
    """
    by_answer: dict[bool, list[tuple[float, Rescored]]] = {True: [], False: []}
    for one in scored:
        given, reward = one.given, one.after[SUM]
        if given.answer is not None and reward is not None:
            is_right = is_correct(
                given.completion, answer=given.answer, tags=given.tags, extraction=extraction
            )
            by_answer[is_right].append((reward, one))
    right = [reward for reward, _ in by_answer[True]]
    median = float(np.median(right)) if right else None
    high = [one for reward, one in by_answer[False] if median is None or reward >= median]
    return {
        "count": len(by_answer[False]),
        "high": len(high),
        "median_of_right": median,
        "samples": [_sample(one, extraction) for one in high[:show]],
    }


def _errors(rollouts: Sequence[Rescored]) -> list[dict[str, Any]]:
    counts, first = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    for one in rollouts:
        for name, error in one.errors.items():
            counts[name, error.cause] += 1
            first.setdefault((name, error.cause), error.message)
    return [
        {"part": name, "cause": cause, "count": count, "first": first[name, cause]}
        for (name, cause), count in counts.most_common()
    ]


def _sample(one: Rescored, extraction: AnswerPlace) -> dict[str, Any]:
    given = one.given
    return {
        "step": one.step,
        "prompt_id": given.prompt_id,
        "sample": one.sample,
        "before": one.before[SUM],
        "after": one.after[SUM],
        "parts": {name: value for name, value in one.after.items() if name != SUM},
        "prompt": given.prompt,
        "answer": given.answer,
        "extracted": find_answer(given.completion, tags=given.tags, extraction=extraction),
        "stop_reason": given.stop_reason,
        "text": given.completion,
    }


def _sample_lines(sample: Figures, title: str) -> Iterator[str]:
    parts = ", ".join(f"{name} {_number(value)}" for name, value in sample["parts"].items())
    yield (
        f"{title}: step {sample['step']}, prompt {sample['prompt_id']}, sample {sample['sample']}: "
        f"{_number(sample['before'])} before, {_number(sample['after'])} after ({parts})"
    )
    if sample["answer"] is not None:
        yield f"  extracted answer {sample['extracted']!r}, reference {sample['answer']!r}"
    yield from _text_lines("prompt", sample["prompt"], _LONGEST_PROMPT)
    yield from _text_lines("completion", sample["text"], _LONGEST_TEXT)


def _text_lines(title: str, text: str, longest: int) -> Iterator[str]:
    """The text, without its middle if it is long; control characters are escaped."""
    if len(text) > longest:
        text = f"{text[: longest // 2]} [...] {text[-longest // 2 :]}"
    first, *rest = text.split("\n")
    yield f"  {title}: {_escaped(first)}"
    yield from (f"    {_escaped(line)}" for line in rest)


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
