"""Scores the recorded rollouts of a run again, with the reward functions of a configuration."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from tqdm import tqdm

from configs.base import nearest_hint
from configs.load import load_config
from configs.schema import Config
from pipeline.rollout.scoring import SUM, score_parts
from pipeline.run.rollout_records import recorded_input
from pipeline.run.run_folder import RunFolder
from pipeline.tables import table
from rewards.answers import find_answer, same_answer
from rewards.base import Outcome, RewardError, RewardInput, Tags
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog

_CHUNK = 256
"""Rollouts that are scored between two updates of the progress."""
_QUANTILES = {"q05": 0.05, "q50": 0.5, "q95": 0.95}
_LONGEST_PROMPT, _LONGEST_TEXT = 300, 800
_SHOWN = 3
"""Completions of each kind in the report."""
_DIFFERENCE = 1e-9
"""Smaller differences of rewards are rounding."""

Figures = Mapping[str, Any]
Recorded = Sequence[tuple[Mapping[str, Any], RewardInput]]
"""Records, each with the input of the reward functions."""


@dataclass(frozen=True)
class _Rescored:
    """A recorded rollout with its rewards before and after.

    Attributes:
        group: step that started it, and prompt.
        before: recorded values of the parts and, as `SUM`, their weighted sum; None: no value.
        after: the same, scored again.
        errors: of parts, and of the weighted sum, that failed when scored again.
        is_right: whether the answer in the completion equals the reference; None: there is none.
        sample: what the report shows of it.
    """

    group: tuple[int, int]
    before: Mapping[str, float | None]
    after: Mapping[str, float | None]
    errors: Mapping[str, RewardError]
    is_right: bool | None
    sample: Figures


def rescore(
    config: Config, run_dir: str, *, log: RewardLog, steps: str | None
) -> tuple[Figures, Iterator[str]]:
    """Scores the recorded rollouts of a run; returns the figures as JSON, and the report.

    `steps` are the first and the last, as "A:B", "A:" or ":B"; None: all.

    Raises:
        FileNotFoundError: if there are no such rollouts.
        ValueError: if they cannot be read or scored again.
    """
    folder = RunFolder(Path(run_dir).expanduser())
    if not folder.path.is_dir():
        hint = nearest_hint(folder.path)
        raise FileNotFoundError(f"command line: --rollouts: no folder {folder.path}{hint}")
    tags = Tags.of_run(load_config(folder.path))
    numbers = folder.rollout_steps()
    asked = _chosen(steps, numbers)
    if not asked:
        has = f"it has steps {numbers[0]} to {numbers[-1]}" if numbers else "it has none"
        raise FileNotFoundError(f"{folder.rollouts}: no rollouts of the steps asked for; {has}")
    recorded = [
        (record, recorded_input(record, tags=tags))
        for one in asked
        for record in folder.read_rollouts(f"step_{one:06d}")
    ]
    figures = _figures(asyncio.run(_rescore(config, recorded, log=log)))
    return figures, _lines(figures)


async def _rescore(config: Config, recorded: Recorded, *, log: RewardLog) -> list[_Rescored]:
    """Scores all rollouts.

    Raises:
        ValueError: if a function cannot be used, with a line for each.
    """
    outcomes = list[dict[str, Outcome]]()
    async with RewardHost(config.rewards, log=log) as host:
        await host.start()
        with tqdm(total=len(recorded), unit="rollout", delay=2, leave=False, disable=None) as bar:
            for start in range(0, len(recorded), _CHUNK):
                chunk = [given for _, given in recorded[start : start + _CHUNK]]
                outcomes += await host.score(chunk)
                bar.update(len(chunk))
    return [
        _rescored(record, given, own, config)
        for (record, given), own in zip(recorded, outcomes, strict=True)
    ]


def _rescored(
    record: Mapping[str, Any], given: RewardInput, outcomes: Mapping[str, Outcome], config: Config
) -> _Rescored:
    scores = score_parts(outcomes, num_tokens=record["num_tokens"], config=config)
    found = find_answer(given.completion, tags=given.tags, extraction=config.extraction)
    is_right = None
    if given.answer is not None:
        is_right = found is not None and same_answer(found, given.answer)
    sample = {
        "step": record["step"] + 1,  # as in file names
        "prompt_id": given.prompt_id,
        "sample": record["sample"],
        "before": record["reward"],
        "after": scores.reward,
        "parts": scores.rewards,
        "prompt": given.prompt,
        "answer": given.answer,
        "extracted": found,
        "text": given.completion,
    }
    return _Rescored(
        (record["step"] + 1, given.prompt_id),
        before={**record["rewards"], SUM: record["reward"]},
        after={**scores.rewards, SUM: scores.reward},
        errors=scores.errors,
        is_right=is_right,
        sample=sample,
    )


def _chosen(steps: str | None, recorded: Sequence[int]) -> list[int]:
    """The recorded steps from A to B of `A:B`.

    Raises:
        ValueError: if the text has another form.
    """
    match = re.fullmatch(r"(\d*):(\d*)", steps or ":", re.ASCII)
    if match is None:
        raise ValueError(f"command line: --steps {steps}: must be A:B, A: or :B")
    first, last = int(match[1] or 0), int(match[2] or max(recorded, default=0))
    return [one for one in recorded if first <= one <= last]


# --- the report


def _figures(rollouts: Sequence[_Rescored]) -> dict[str, Any]:
    """All figures of the report, as JSON."""
    groups = defaultdict[tuple[int, int], list[_Rescored]](list)
    for one in rollouts:
        groups[one.group].append(one)
    names = dict.fromkeys(name for one in rollouts for name in (*one.after, *one.before))
    names[SUM] = names.pop(SUM)  # the last row
    ranked = [(reward, one) for one in rollouts if (reward := one.after[SUM]) is not None]
    ranked.sort(key=lambda pair: pair[0], reverse=True)
    samples, errors = [one.sample for _, one in ranked], _errors(rollouts)
    return {
        "rollouts": len(rollouts),
        "groups": len(groups),
        "steps": sorted({step for step, _ in groups}),
        "parts": {
            name: {
                "before": _distribution(one.before.get(name) for one in rollouts),
                "after": _distribution(one.after.get(name) for one in rollouts),
            }
            for name in names
        },
        "groups_with_signal": {
            "before": _signal([one.before[SUM] for one in group] for group in groups.values()),
            "after": _signal([one.after[SUM] for one in group] for group in groups.values()),
        },
        "rank_correlation": _rank_correlation(groups.values()),
        "best": samples[:_SHOWN],
        "worst": samples[::-1][:_SHOWN],
        "wrong": _wrong(ranked),
        "errors": errors,
        "passed": not errors,
    }


def _distribution(values: Iterable[float | None]) -> dict[str, float]:
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


def _signal(groups: Iterable[Sequence[float | None]]) -> float:
    """Share of groups whose rewards differ."""
    known = [[value for value in group if value is not None] for group in groups]
    return float(np.mean([len(one) > 1 and np.ptp(one) > _DIFFERENCE for one in known]))


def _rank_correlation(groups: Iterable[Sequence[_Rescored]]) -> dict[str, Any]:
    """Mean of the groups with signal among the rollouts that have a reward before and after."""
    found = []
    for group in groups:
        both = [(one.before[SUM], one.after[SUM]) for one in group]
        pairs = np.array([pair for pair in both if None not in pair], float)
        if len(pairs) > 1 and np.ptp(pairs, axis=0).min() > _DIFFERENCE:
            found.append(spearmanr(pairs).statistic)
    return {"mean": float(np.mean(found)) if found else None, "groups": len(found)}


def _wrong(ranked: Sequence[tuple[float, _Rescored]]) -> dict[str, Any]:
    """Rollouts with a wrong answer and a high reward: at least the median of right ones."""
    right = [reward for reward, one in ranked if one.is_right]
    wrong = [(reward, one) for reward, one in ranked if one.is_right is False]
    median = float(np.median(right)) if right else None
    high = [one.sample for reward, one in wrong if median is None or reward >= median]
    return {
        "count": len(wrong),
        "high": len(high),
        "median_of_right": median,
        "samples": high[:_SHOWN],
    }


def _errors(rollouts: Sequence[_Rescored]) -> list[dict[str, Any]]:
    counts, first = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    for one in rollouts:
        for name, error in one.errors.items():
            counts[name, error.cause] += 1
            first.setdefault((name, error.cause), error.message)
    return [
        {"part": name, "cause": cause, "count": count, "first": first[name, cause]}
        for (name, cause), count in counts.most_common()
    ]


def _lines(figures: Figures) -> Iterator[str]:
    """The lines of the report."""
    yield f"{figures['rollouts']} rollouts in {figures['groups']} groups, scored again"
    yield ""
    heads = ("n", "mean", "std", *_QUANTILES, "lowest", "highest")
    rows = [["reward", "", *heads, ""]]
    for name, found in figures["parts"].items():
        for when, one in found.items():
            cells = [f"{one[head]:.4g}" if head in one else "-" for head in heads]
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
    wrong = figures["wrong"]
    if wrong["count"] and wrong["median_of_right"] is None:
        yield from ("", f"{wrong['count']} rollouts have a wrong answer, none has a right one")
    elif wrong["count"]:
        yield ""
        yield (
            f"{wrong['high']} of {wrong['count']} rollouts with a wrong answer have at least the "
            f"median reward of right ones ({_number(wrong['median_of_right'])})"
        )
    for sample in wrong["samples"]:
        yield from ("", *_sample_lines(sample, "high reward, wrong answer"))
    for error in figures["errors"]:
        what = f"{error['part']!r}: {error['count']} rollouts have no score ({error['cause']})"
        yield from ("", f"ERROR: {what}, first: {error['first']}")


def _sample_lines(sample: Figures, title: str) -> Iterator[str]:
    parts = ", ".join(f"{name} {_number(value)}" for name, value in sample["parts"].items())
    yield (
        f"{title}: step {sample['step']}, prompt {sample['prompt_id']}, sample {sample['sample']}: "
        f"{_number(sample['before'])} before, {_number(sample['after'])} after ({parts})"
    )
    if sample["answer"] is not None:
        yield f"  extracted answer {sample['extracted']!r}, reference {sample['answer']!r}"
    texts = (("prompt", _LONGEST_PROMPT), ("text", _LONGEST_TEXT))
    for key, longest in texts:
        text = sample[key]
        if len(text) > longest:
            text = f"{text[: longest // 2]} [...] {text[-longest // 2 :]}"
        yield f"  {'completion' if key == 'text' else key}:"
        yield from (f"    {line!r}" for line in text.split("\n"))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
