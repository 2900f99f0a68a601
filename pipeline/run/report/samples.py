"""Rollouts and answers of a run through time, side by side: early, in the middle, late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.run.report.run_records import RunRecords
from pipeline.run.rollout_samples import Record, picked

_KINDS: Mapping[tuple[bool | None, bool | None], str] = {
    (False, True): "won",
    (True, False): "lost",
    (False, False): "still wrong",
}
"""Prompts by whether their first and their last answer are right."""


@dataclass(frozen=True)
class Sample:
    """A completion: its step, prompt ("": not shown again), text, facts; whether it is right."""

    at: str
    prompt: str
    text: str
    facts: str
    right: bool | None = None


Rows = list[tuple[str, list[Sample]]]
"""Completions through time, by what those of a row have in common."""


def rollout_rows(run: RunRecords) -> Rows:
    """The best, the median and the worst rollout of an early, a middle and a late step."""
    found: dict[str, list[Sample]] = {"best": [], "median": [], "worst": []}
    for step in _spread(run.rollout_steps()):
        for kind, record in picked(run.rollouts(f"step_{step:06d}"), each=1):
            found[kind].append(_rollout(f"step {step}", record))
    return [(kind, samples) for kind, samples in found.items() if samples]


def answer_rows(run: RunRecords) -> Rows:
    """Answers to the same prompts of the first, a middle and the last validation.

    One prompt that was won, one that was lost and one that is still wrong.
    """
    evaluated = _spread(run.evaluations("validation"))
    answers = [
        {(row["prompt_id"], row["sample"]): row for row in run.rollouts(one["file"])}
        for one in evaluated
    ]
    if len(answers) < 2:
        return []
    rows = {}
    for key in answers[0]:
        records = [own[key] for own in answers if key in own]
        if len(records) < len(answers):
            continue
        kind = _KINDS.get((records[0]["correct"], records[-1]["correct"]))
        if kind is not None and kind not in rows:
            title = f"{kind}: prompt {key[0]}, reference answer {records[0]['answer']}"
            pairs = zip(evaluated, records, strict=True)
            rows[kind] = (title, [_answer(one["step"], record) for one, record in pairs])
    return [rows[kind] for kind in _KINDS.values() if kind in rows]


def _spread(items: Sequence[Any]) -> list[Any]:
    """The first, a middle and the last one; all if there are fewer."""
    return [items[0], items[len(items) // 2], items[-1]] if len(items) > 3 else list(items)


def _rollout(at: str, record: Record) -> Sample:
    parts = [
        f"{name} {value:.3g}" for name, value in record["rewards"].items() if value is not None
    ]
    facts = [f"reward {record['reward']:.3g} ({', '.join(parts)})"]
    if (advantage := record.get("advantage")) is not None:
        facts.append(f"advantage {advantage:+.2f}")
    facts += [_end(record)]
    return Sample(at, record["prompt"], record["text"], ", ".join(facts))


def _answer(step: int, record: Record) -> Sample:
    facts = f"{'right' if record['correct'] else 'wrong'}, {_end(record)}"
    at = f"validation after step {step}"
    return Sample(at, "", record["text"], facts, right=record["correct"])


def _end(record: Record) -> str:
    return f"{record['num_tokens']} tokens, ended by {record['stop_reason']}"
