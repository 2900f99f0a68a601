"""Which rollouts are shown."""

from __future__ import annotations

from typing import Any

from pipeline.run.rollout_samples import distributions, sample_rollouts, sample_table


def record(
    name: str, reward: float | None, advantage: float, logprob: float | None, **more: Any
) -> dict[str, Any]:
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
        "logprob_mean": logprob,
        **more,
    }


RECORDS = [
    record("easy", 1.0, 0.1, -0.1),
    record("rare success", 1.0, 1.5, -0.2),
    record("failure", 0.0, -0.5, -0.3),
    record("rare failure", 0.0, -1.5, -0.1),
    record("unexpected success", 0.9, 0.4, -2.0),
    record("unexpected failure", 0.1, -0.2, -3.0),
    record("excluded", None, 0.0, -0.1),
    record("other", 0.5, 0.2, -0.4),
]


def test_each_rollout_is_shown_once():
    found = [(kind, one["text"]) for kind, one in sample_rollouts(RECORDS, seed=3)]
    assert found[:6] == [
        ("best", "rare success"),
        ("best", "easy"),
        ("worst", "rare failure"),
        ("worst", "failure"),
        ("surprising", "unexpected success"),
        ("surprising", "other"),
    ]
    assert {kind for kind, _ in found[6:]} == {"random"}
    assert {name for _, name in found} == {one["text"] for one in RECORDS}


def test_without_advantages_the_surprising_one_is_the_least_likely():
    equal = [record(str(n), 0.0, 0.0, -n) for n in range(5)]
    found = sample_rollouts(equal, seed=1)
    assert ("surprising", "4") in [(kind, one["text"]) for kind, one in found]


def test_a_table_has_a_column_for_each_part():
    columns, rows = sample_table([RECORDS[1], {**RECORDS[6], "rewards": {"other": 2.0}}], step=7)
    assert columns == [
        *("step", "pick", "version", "prompt", "answer", "text", "stop_reason", "num_tokens"),
        *("reward", "advantage", "logprob_mean", "reward/correct", "reward/format"),
        "reward/other",
    ]
    first = [
        7,
        "best",
        3,
        "question",
        "1",
        "rare success",
        "eos",
        4,
        1.0,
        1.5,
        -0.2,
        1.0,
        0.5,
        None,
    ]
    assert rows[0] == first
    assert rows[1][-3:] == [None, None, 2.0]


def test_histograms_are_of_the_values_that_exist():
    found = distributions(RECORDS)
    assert found["histogram/tokens"] == [4] * 8
    assert len(found["histogram/reward"]) == 7
    assert distributions([record("empty", None, 0.0, None)]).keys() == {
        "histogram/tokens",
        "histogram/advantage",
    }
