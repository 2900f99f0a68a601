"""Which rollouts W&B and the report show."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.run.rollout_samples import sample_table


def record(name: str, reward: float | None, advantage: float, **more: Any) -> dict[str, Any]:
    return {
        "prompt": "question",
        "answer": "1",
        "text": name,
        "stop_reason": "eos",
        "num_tokens": 4,
        "versions": [2, 3],
        "rewards": {"correct": reward, "format": 0.5},
        "reward": reward,
        "advantage": advantage,
        "logprob_mean": -0.2,
        **more,
    }


RECORDS = [
    record("success", 1.0, 0.1),
    record("rare success", 1.0, 1.5),
    record("failure", 0.0, -0.5, rewards={"other": 2.0}),
    record("rare failure", 0.0, -1.5),
    record("nearly", 0.9, 0.4),
    record("hardly", 0.1, -0.2),
    record("excluded", None, 0.0),
    record("half", 0.5, 0.2),
]


@pytest.mark.parametrize(
    ("count", "best", "median", "worst"),
    [
        (8, ["rare success", "success"], ["nearly", "half"], ["failure", "rare failure"]),
        (3, ["rare success", "success"], [], ["failure"]),
        (1, ["success"], [], []),
    ],
)
def test_the_best_median_and_worst_are_shown_once(
    count: int, best: list[str], median: list[str], worst: list[str]
):
    columns, rows = sample_table(RECORDS[:count], step=7)
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    picks = {"best": best, "median": median, "worst": worst}
    assert [(row["pick"], row["text"]) for row in found] == [
        (pick, text) for pick, texts in picks.items() for text in texts
    ]
    assert {row["reward/correct"] for row in found if row["pick"] == "best"} == {1.0}
