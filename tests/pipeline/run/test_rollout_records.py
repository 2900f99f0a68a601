"""Records of rollouts, and their way back to the reward functions."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.run.rollout_records import recorded_input, rollout_records
from pipeline.run.run_folder import RunFolder
from pipeline.types import Rollout, RolloutName, RolloutRequest
from rewards.base import RewardError, RewardInput, Tags
from tests.samples import EOS, FRESH, changed, completion, logprobs, make_config

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


def test_a_rollouts_record():
    assert rollout_records([rollout()], tokens=False) == [RECORD]
    failed = rollout(
        CHAT,
        rewards={"correct": None, "format": 0.5},
        reward=None,
        advantage=0.0,
        errors={"correct": RewardError("died", "ended its process")},
        excluded="died",
    )
    assert rollout_records([failed], tokens=False) == [
        RECORD
        | {
            "answer": None,
            "rewards": {"correct": None, "format": 0.5},
            "errors": {"correct": {"cause": "died", "message": "ended its process"}},
            "reward": None,
            "excluded": "died",
            "advantage": 0.0,
            "messages": CHAT.messages,
            "source": "more",
        }
    ]


def test_a_record_with_tokens():
    (record,) = rollout_records([rollout()], tokens=True)
    drawn = rollout().completion
    assert record == {
        **RECORD,
        "prompt_tokens": [2, 5],
        "tokens": [97, 98, 99, 1],
        "logprobs": drawn.logprobs.tolist(),
    }
    assert np.array_equal(np.float32(record["logprobs"]), drawn.logprobs)
    kept = rollout(completion=changed(drawn, processed_logprobs=drawn.logprobs / 2))
    (cut,) = rollout_records([kept], tokens=True)
    assert cut == {**record, "processed_logprobs": (drawn.logprobs / 2).tolist()}
    assert rollout_records([kept], tokens=False) == [RECORD]


def test_a_record_has_the_version_of_each_segment():
    drawn = rollout().completion
    (whole,) = drawn.segments
    segments = tuple(
        replace(whole, tokens=whole.tokens[at], logprobs=whole.logprobs[at], version=version)
        for version, at in ((4, slice(1)), (5, slice(1, 3)), (6, slice(3, None)))
    )
    several = rollout(completion=replace(drawn, segments=segments))
    assert rollout_records([several], tokens=False) == [
        {**RECORD, "versions": [4, 5, 6], "version_tokens": [1, 2, 1]}
    ]


def test_reward_functions_get_the_same_input_from_the_file(tmp_path: Path):
    folder = RunFolder.of(make_config(tmp_path))
    folder.rollouts.mkdir(parents=True)
    rollouts = [rollout(), rollout(CHAT)]
    folder.write_rollouts("step_000007", rollout_records(rollouts, tokens=False))
    records = folder.read_rollouts("step_000007")
    assert [recorded_input(record, tags=TAGS) for record in records] == [GIVEN, CHAT]


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
    (record,) = rollout_records([rollout(replace(GIVEN, row=row))], tokens=False)
    assert json.loads(json.dumps(record["row"], allow_nan=False)) == {
        "array": [[1.0, None]],
        "number": 3,
        "flag": True,
        "infinite": None,
        "date": "2026-11-23",
        "image": "4 bytes",
        "nested": {"1": ["a", [2]]},
    }
