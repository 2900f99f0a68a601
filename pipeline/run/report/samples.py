"""Rollouts and answers of a run through time, side by side: early, in the middle, late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.run.report.run_records import RunRecords

MOST_TEXT = 1_500
"""Characters of a prompt or a completion that are shown; of longer ones begin and end."""
_TIMES = 3

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """A completion.

    Attributes:
        text: the completion, shortened.
        facts: rewards, length and how it ended.
        right: whether the answer is right; None: not known.
    """

    text: str
    facts: str
    right: bool | None = None


@dataclass(frozen=True)
class Row:
    """Completions through time, one for each column.

    Attributes:
        title: what they have in common.
        prompts: the prompt of each, shortened; empty: it is not recorded.
        samples: the completions; None where there is none.
    """

    title: str
    prompts: Sequence[str]
    samples: Sequence[Sample | None]


@dataclass(frozen=True)
class Table:
    """Rows of completions under the same steps.

    Attributes:
        columns: the steps.
        rows: may be empty.
    """

    columns: Sequence[str]
    rows: Sequence[Row]


def rollout_table(run: RunRecords) -> Table:
    """The best, the median and the worst rollout of an early, a middle and a late step."""
    steps = _spread(run.rollout_steps())
    by_step = [
        [one for one in run.rollouts(f"step_{step:06d}") if one.get("reward") is not None]
        for step in steps
    ]
    return Table([f"step {step}" for step in steps], _ranked(by_step))


def answer_table(run: RunRecords) -> Table:
    """Answers to the same prompts of the first, a middle and the last validation.

    One prompt that was won, one that was lost and one that is still wrong.
    """
    evaluated = _spread(run.evaluations("validation"))
    columns = [f"validation after step {one['step']}" for one in evaluated]
    answers = [
        {(row["prompt_id"], row["sample"]): row for row in run.rollouts(one["file"])}
        for one in evaluated
    ]
    if len(evaluated) < 2 or not all(answers):
        return Table(columns, [])
    rows = [row for wanted in ("won", "lost", "still wrong") for row in _answers(answers, wanted)]
    return Table(columns, rows)


def shortened(text: str) -> str:
    """The text, or begin and end of a long one."""
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _spread(items: Sequence[Any]) -> list[Any]:
    """The first, a middle and the last one; all if there are fewer."""
    if len(items) <= _TIMES:
        return list(items)
    return [items[0], items[len(items) // 2], items[-1]]


def _ranked(by_step: Sequence[Sequence[Record]]) -> list[Row]:
    places = {"best": -1, "median": None, "worst": 0}
    rows = []
    for title, place in places.items():
        chosen: list[Record | None] = []
        for records in by_step:
            ranked = sorted(records, key=lambda one: one["reward"])
            at = len(ranked) // 2 if place is None else place
            chosen.append(ranked[at] if ranked else None)
        if any(chosen):
            prompts = ["" if one is None else shortened(one["prompt"]) for one in chosen]
            rows.append(
                Row(title, prompts, [None if one is None else _sample(one) for one in chosen])
            )
    return rows


def _sample(record: Record) -> Sample:
    parts = [
        f"{name} {value:.3g}" for name, value in record["rewards"].items() if value is not None
    ]
    advantage = record.get("advantage")
    shown = [] if advantage is None else [f"advantage {advantage:+.2f}"]
    ended = [f"{record['num_tokens']} tokens", f"ended by {record['stop_reason']}"]
    facts = [f"reward {record['reward']:.3g}", f"({', '.join(parts)})"]
    return Sample(shortened(record["text"]), ", ".join([" ".join(facts), *shown, *ended]))


def _answers(answers: Sequence[Mapping[tuple[int, int], Record]], wanted: str) -> list[Row]:
    """A prompt whose first and last answer are as wanted."""
    pairs = {(False, True): "won", (True, False): "lost", (False, False): "still wrong"}
    for key, first in answers[0].items():
        last = answers[-1].get(key)
        if last is None or first["correct"] is None:
            continue
        if pairs.get((bool(first["correct"]), bool(last["correct"]))) == wanted:
            title = f"{wanted}: prompt {key[0]}, reference answer {first['answer']}"
            found = [own.get(key) for own in answers]
            return [Row(title, [], [None if one is None else _answer(one) for one in found])]
    return []


def _answer(record: Record) -> Sample:
    word = "right" if record["correct"] else "wrong"
    facts = f"{word}, {record['num_tokens']} tokens, ended by {record['stop_reason']}"
    return Sample(shortened(record["text"]), facts, right=record["correct"])
