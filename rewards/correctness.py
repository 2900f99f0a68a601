"""Rewards for being right."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.answers import is_correct
from rewards.base import RewardInput


def exact_answer(inputs: Sequence[RewardInput]) -> list[float]:
    """1 where the last answer block says what the reference answer says, else 0."""
    return [float(is_correct(i.completion, answer=i.answer, tags=i.tags)) for i in inputs]
