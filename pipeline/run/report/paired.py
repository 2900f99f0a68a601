"""Paired comparison of the recorded answers of two evaluations, on the prompts that both have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from configs.evaluation import EXACT_ANSWER
from pipeline.evaluate.evaluation import Evaluation, compare
from pipeline.evaluate.summary import ACCURACY

Answers = Sequence[Mapping[str, Any]]


def paired_change(
    before: Answers, after: Answers, *, summary: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Both summaries and the change, as `evaluation.compare` returns them.

    Prompts are the same if id and reference answer are; of each the samples that both have count.

    Args:
        before: rows of an evaluation's file.
        after: rows of another.
        summary: of one of them; both have its metric.

    Returns:
        None if they have no prompt in common.
    """
    ours, theirs = _by_prompt(before), _by_prompt(after)
    common = [prompt for prompt in ours if prompt in theirs]
    if not common:
        return None
    samples = min(len(found[prompt]) for found in (ours, theirs) for prompt in common)
    metric = summary["metric"]
    of_accuracy = metric != EXACT_ANSWER and ACCURACY in summary
    one, other = (
        Evaluation.of(
            [row for prompt in common for row in found[prompt][:samples]],
            metric=metric,
            of_accuracy=of_accuracy,
        )
        for found in (ours, theirs)
    )
    return compare(one, other)


def _by_prompt(rows: Answers) -> dict[tuple[int, str | None], list[Mapping[str, Any]]]:
    found: dict[tuple[int, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["prompt_id"], row["answer"]), []).append(row)
    return found
