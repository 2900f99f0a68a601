"""Records of rollouts, their way back to the reward functions, and those that are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.run.rollout_records import recorded_input, rollout_records
from pipeline.run.rollout_samples import distributions, sample_table
from pipeline.types import Rollout, RolloutName, RolloutRequest
from rewards.base import RewardError, RewardInput, Tags
from tests.samples import EOS, FRESH, changed, completion, logprobs

TAGS = Tags("<r>", "</r>", "<a>", "</a>")
GIVEN = RewardInput(
    "<user>3 x 4?",
    "abc",
    "eos",
    "12",
    {"question": "3 x 4?", "answer": "12", "level": 2, "tags": ["a", None], "weight": 0.1},
    TAGS,
    prompt_id=9,
)
CHAT = replace(
    GIVEN,
    answer=None,
    source="more",
    messages=[{"role": "user", "content": "3 x 4? \u2028 \ud800"}],
)


def rollout(given: RewardInput = GIVEN, **changes: Any) -> Rollout:
    request = RolloutRequest(RolloutName("train", 6, 9, 3), np.array([2, 5], np.int32))
    drawn = completion(request, given.completion, version=6)
    parts = {"correct": 1.0, "format": 0.5, "format/steps": 0.5}
    return replace(Rollout(drawn, given, parts, 1.5, 0.25), **changes)


def recorded(one: Rollout, *, tokens: bool = False) -> dict[str, Any]:
    (record,) = rollout_records([one], tokens=tokens)
    return record


RECORD = {
    "prompt_id": 9,
    "sample": 3,
    "step": 6,
    "versions": [6],
    "version_tokens": [4],
    "adapter_sha256": FRESH,
    "prompt": "<user>3 x 4?",
    "answer": "12",
    "row": GIVEN.row,
    "text": "abc",
    "num_tokens": 4,
    "logprob_mean": float(np.mean(logprobs(np.array([97, 98, 99, EOS]), FRESH), dtype=float)),
    "stop_reason": "eos",
    "rewards": {"correct": 1.0, "format": 0.5, "format/steps": 0.5},
    "errors": {},
    "reward": 1.5,
    "excluded": None,
    "advantage": 0.25,
}


def test_a_record_has_all_of_a_rollout():
    assert recorded(rollout()) == RECORD
    outcome: dict[str, Any] = {"rewards": {"correct": None}, "reward": None, "excluded": "died"}
    failed = rollout(CHAT, **outcome, errors={"correct": RewardError("died", "ended its process")})
    told: dict[str, Any] = {
        "errors": {"correct": {"cause": "died", "message": "ended its process"}}
    }
    told |= {**outcome, "answer": None, "messages": CHAT.messages, "source": "more"}
    assert recorded(failed) == RECORD | told
    # Three segments of different versions.
    drawn = rollout().completion
    (whole,) = drawn.segments
    segments = tuple(
        replace(whole, tokens=whole.tokens[at], logprobs=whole.logprobs[at], version=version)
        for version, at in ((4, slice(1)), (5, slice(1, 3)), (6, slice(3, None)))
    )
    several = rollout(completion=replace(drawn, segments=segments))
    assert recorded(several) == {**RECORD, "versions": [4, 5, 6], "version_tokens": [1, 2, 1]}


def test_a_record_with_tokens():
    drawn = rollout().completion
    kept = rollout(completion=changed(drawn, processed_logprobs=drawn.logprobs / 2))
    record = recorded(kept, tokens=True)
    told = {"prompt_tokens": [2, 5], "tokens": [97, 98, 99, 1]}
    told |= {"processed_logprobs": (drawn.logprobs / 2).tolist()}
    assert record == {**RECORD, **told, "logprobs": drawn.logprobs.tolist()}
    assert np.array_equal(np.float32(record["logprobs"]), drawn.logprobs)


def test_reward_functions_get_the_same_input_from_the_file():
    for given in (GIVEN, CHAT):
        line = json.dumps(recorded(rollout(given)))
        assert recorded_input(json.loads(line), tags=TAGS) == given


def test_columns_that_are_not_json_are_written_as_json():
    row = {
        "array": np.array([[1.0, np.nan]]),
        "number": np.int64(3),
        "flag": np.bool_(True),
        "infinite": float("inf"),
        "date": date(2026, 11, 23),
        "image": b"1234",
        "nested": {1: (Path("a"), {2})},
    }
    record = recorded(rollout(replace(GIVEN, row=row)))
    assert json.loads(json.dumps(record["row"], allow_nan=False)) == {
        "array": [[1.0, None]],
        "number": 3,
        "flag": True,
        "infinite": None,
        "date": "2026-11-23",
        "image": "4 bytes",
        "nested": {"1": ["a", [2]]},
    }


# --- the rollouts that W&B and the report show


def sample(name: str, reward: float | None, advantage: float, **more: Any) -> dict[str, Any]:
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


SAMPLES = [
    sample("success", 1.0, 0.1),
    sample("rare success", 1.0, 1.5),
    sample("failure", 0.0, -0.5, rewards={"other": 2.0}),
    sample("rare failure", 0.0, -1.5),
    sample("nearly", 0.9, 0.4),
    sample("hardly", 0.1, -0.2),
    sample("excluded", None, 0.0),
    sample("half", 0.5, 0.2),
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
    columns, rows = sample_table(SAMPLES[:count], step=7)
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    picks = {"best": best, "median": median, "worst": worst}
    assert [(row["pick"], row["text"]) for row in found] == [
        (pick, text) for pick, texts in picks.items() for text in texts
    ]
    assert {row["reward/correct"] for row in found if row["pick"] == "best"} == {1.0}


def test_histograms_are_of_the_values_that_exist():
    found = distributions(SAMPLES)
    assert found["histogram/tokens"] == [4] * 8
    assert len(found["histogram/reward"]) == 7
    empty = sample("empty", None, 0.0, logprob_mean=None)
    assert distributions([empty]).keys() == {"histogram/tokens", "histogram/advantage"}
