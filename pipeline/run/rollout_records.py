"""Records of rollouts, all that is needed to read and to score them again; of demonstrations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date, time
from typing import Any

import numpy as np

from pipeline.data.packed_batch import PackedRow
from pipeline.types import Rollout
from rewards.base import RewardInput, Tags


def rollout_records(rollouts: Sequence[Rollout], *, tokens: bool) -> list[dict[str, Any]]:
    """Rollouts as JSON objects, each complete; with `tokens` also token ids and log-probs.

    Columns of the dataset's row that are not JSON are written as JSON: arrays and sets as lists,
    dates as ISO 8601, numbers that are not finite as null, bytes as their number, others as text.
    """
    rows = []
    for rollout in rollouts:
        completion, given = rollout.completion, rollout.given
        segments = [segment for segment in completion.segments if len(segment.tokens)]
        logprobs = completion.logprobs
        row: dict[str, Any] = {
            "prompt_id": completion.name.prompt_id,
            "sample": completion.name.sample,
            "step": completion.name.step,
            "versions": [segment.version for segment in segments],
            "version_tokens": [len(segment.tokens) for segment in segments],
            "adapter_sha256": completion.adapter_sha256,
            "prompt": given.prompt,
            "answer": given.answer,
            "row": _plain(given.row),
            "text": given.completion,
            "num_tokens": len(completion.tokens),
            "logprob_mean": float(np.mean(logprobs, dtype=np.float64)) if len(logprobs) else None,
            "stop_reason": completion.stop_reason,
            "rewards": dict(rollout.rewards),
            "errors": {name: asdict(error) for name, error in rollout.errors.items()},
            "reward": rollout.reward,
            "excluded": rollout.excluded,
            "advantage": rollout.advantage,
        }
        if given.messages is not None:
            row["messages"] = _plain(given.messages)
        if rollout.source is not None:
            row["source"] = rollout.source
        if tokens:
            row["prompt_tokens"] = completion.prompt_tokens.tolist()
            row["tokens"] = completion.tokens.tolist()
            row["logprobs"] = logprobs.tolist()
            if completion.processed_logprobs is not None:
                row["processed_logprobs"] = completion.processed_logprobs.tolist()
        rows.append(row)
    return rows


def demonstration_rows(sequences: Sequence[PackedRow]) -> list[dict[str, Any]]:
    """Packed demonstrations of the SFT phase as JSON objects."""
    return [
        {
            "id": example.id,
            "sequence": number,
            "prompt_tokens": example.prompt_tokens.tolist(),
            "tokens": example.completion_tokens.tolist(),
        }
        for number, packed in enumerate(sequences)
        for example in packed
    ]


def recorded_input(record: Mapping[str, Any], *, tags: Tags) -> RewardInput:
    """The input of the reward functions for a rollout that `rollout_records` wrote."""
    return RewardInput(
        prompt=record["prompt"],
        completion=record["text"],
        stop_reason=record["stop_reason"],
        answer=record["answer"],
        row=record["row"],
        tags=tags,
        source=record.get("source"),
        messages=record.get("messages"),
        prompt_id=record["prompt_id"],
    )


def _plain(value: object) -> Any:
    """The value as JSON."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, date | time):
        return value.isoformat()
    return [_plain(item) for item in value] if isinstance(value, Iterable) else str(value)
