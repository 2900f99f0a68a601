"""Reward functions with mistakes that `launch.reward` must name, and good ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rewards.answers import is_correct
from rewards.base import RewardInput, Tags


def any_number(completion: str, *, answer: str) -> float:
    return float(answer in re.findall(r"-?\d+", completion))


def length_credit(completion: str, *, answer: str, tags: Tags) -> float:
    return is_correct(completion, answer=answer, tags=tags) + len(completion) / 100


def closeness(completion: str, *, answer: str, tags: Tags, scale: float = 10.0) -> float:
    """1 for the right number, falling with the distance; 0 without a number."""
    found = re.fullmatch(
        f".*{re.escape(tags.answer_open)}(-?[0-9]+){re.escape(tags.answer_close)}",
        completion,
        re.DOTALL,
    )
    if found is None:
        return 0.0
    return 1 / (1 + abs(int(found[1]) - int(answer)) / scale)


def boxed(completion: str, *, answer: str) -> float:
    found = re.findall(r"\\boxed\{([^}]*)\}", completion)
    return float(found[-1:] == [answer])


def contains(completion: str, *, answer: str) -> float:
    return float(answer in completion)


def bare(completion: str, *, answer: str) -> float:
    return float(completion.split("\n", maxsplit=1)[0] == answer)


def fails_on_empty(completion: str) -> float:
    return float(ord(completion[0]))


def batch_size(inputs: Sequence[RewardInput]) -> list[float]:
    return [float(len(inputs))] * len(inputs)


async def waits(completion: str) -> float:
    return 1.0


def never(completion: str) -> None:
    return None


def always_one(completion: str) -> float:
    return 1.0


def named(completion: str) -> dict[str, float]:
    return {"length": min(len(completion), 10) / 10, "dots": float("." in completion)}


def style(completion: str) -> float:
    return min(1.0, completion.count(" ") / 5)


def misnamed(text: str) -> float:
    return 1.0


def hangs(completion: str) -> float:
    while True:
        pass
