"""What W&B and the report show of the rollouts of a step: some of them, histograms of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
"""A rollout as `rollout_records` writes it."""

EACH = 2
"""Rollouts of each kind in a table."""
_SHOWN = (
    *("prompt", "answer", "text", "stop_reason", "num_tokens"),
    *("reward", "advantage", "logprob_mean"),
)


def picked(records: Sequence[Record], *, each: int) -> list[tuple[str, Record]]:
    """The best, median and worst rollouts of a step by reward, each once, best first.

    Of equal ones those with the highest advantage are the best: a rare success, a rare failure.

    Args:
        records: of the step; those without a reward are left out.
        each: rollouts of each kind.
    """
    ranked = sorted(
        (record for record in records if record["reward"] is not None),
        key=lambda record: (record["reward"], record["advantage"]),
        reverse=True,
    )
    last = len(ranked) - each
    starts = {"median": last // 2, "worst": last, "best": 0}  # a later one counts
    kinds = {first + n: kind for kind, first in starts.items() for n in range(each)}
    return [(kinds[n], record) for n, record in enumerate(ranked) if n in kinds]


def sample_table(
    records: Sequence[Record], *, step: int
) -> tuple[list[str], list[list[str | float | None]]]:
    """The columns and rows of a table of the `picked` rollouts of a step."""
    chosen = picked(records, each=EACH)
    parts = list(dict.fromkeys(part for _, record in chosen for part in record["rewards"]))
    rows = [
        [
            *(step, kind, max(record["versions"], default=None)),
            *(record[name] for name in _SHOWN),
            *(record["rewards"].get(part) for part in parts),
        ]
        for kind, record in chosen
    ]
    return ["step", "pick", "version", *_SHOWN, *(f"reward/{part}" for part in parts)], rows


def distributions(records: Sequence[Record]) -> dict[str, list[float]]:
    """The values of all rollouts, for histograms; without those that do not exist."""
    columns = {"tokens": "num_tokens", **{n: n for n in ("reward", "advantage", "logprob_mean")}}
    found = {
        f"histogram/{name}": [record[key] for record in records if record[key] is not None]
        for name, key in columns.items()
    }
    return {name: values for name, values in found.items() if values}
