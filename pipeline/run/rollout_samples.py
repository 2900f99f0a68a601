"""Which rollouts of a step are shown to people, chosen from their records.

best, worst   by reward; of equal ones the highest, the lowest advantage: a rare success or failure
surprising    the lowest mean log-prob among those with a positive advantage, or among all if there
              are none: what the policy hardly expected and is now taught
random        any of the others, the same ones each time
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Pick = Literal["best", "worst", "surprising", "random"]
Record = Mapping[str, Any]
"""A rollout as `rollout_records` writes it."""

EACH = 2
"""Rollouts of each kind; fewer if there are not enough."""
_SHOWN = ("prompt", "answer", "text", "stop_reason", "num_tokens", "reward", "advantage")


def sample_rollouts(records: Sequence[Record], *, seed: int) -> list[tuple[Pick, Record]]:
    """Chooses rollouts, each at most once; those without a reward can only be random ones.

    Args:
        records: of a step.
        seed: of the random ones.
    """
    left = list(range(len(records)))
    found: list[tuple[Pick, Record]] = []

    def take(kind: Pick, numbers: Sequence[int]) -> None:
        for number in numbers[:EACH]:
            left.remove(number)
            found.append((kind, records[number]))

    def merit(number: int) -> tuple[float, float]:
        return records[number]["reward"], records[number]["advantage"]

    def rewarded() -> list[int]:
        return [number for number in left if records[number]["reward"] is not None]

    take("best", sorted(rewarded(), key=merit, reverse=True))
    take("worst", sorted(rewarded(), key=merit))
    known = [number for number in rewarded() if records[number]["logprob_mean"] is not None]
    taught = [number for number in known if records[number]["advantage"] > 0]
    take("surprising", sorted(taught or known, key=lambda one: records[one]["logprob_mean"]))
    take("random", random.Random(seed).sample(left, min(EACH, len(left))))
    return found


def sample_table(
    records: Sequence[Record], *, step: int
) -> tuple[list[str], list[list[str | float | None]]]:
    """The chosen rollouts of a step as the columns and rows of a table.

    Args:
        records: of the step.
        step: the step, which is also the seed.
    """
    chosen = sample_rollouts(records, seed=step)
    parts = list(dict.fromkeys(part for _, record in chosen for part in record["rewards"]))
    columns = ["step", "pick", "version", *_SHOWN, "logprob_mean"]
    rows = [
        [
            *(step, kind, max(record["versions"], default=None)),
            *(record[name] for name in (*_SHOWN, "logprob_mean")),
            *(record["rewards"].get(part) for part in parts),
        ]
        for kind, record in chosen
    ]
    return [*columns, *(f"reward/{part}" for part in parts)], rows


def distributions(records: Sequence[Record]) -> dict[str, list[float]]:
    """The values of all rollouts, for histograms; without those that do not exist."""
    names = {"tokens": "num_tokens", **{n: n for n in ("reward", "advantage", "logprob_mean")}}
    found = {
        f"histogram/{name}": [record[key] for record in records if record[key] is not None]
        for name, key in names.items()
    }
    return {name: values for name, values in found.items() if values}
