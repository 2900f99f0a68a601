"""Rewards for correct answers."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.answers import is_correct
from rewards.base import RewardInput


def exact_answer(inputs: Sequence[RewardInput]) -> list[float]:
    """1 if the last answer block equals the reference answer, else 0."""
    return [float(is_correct(i.completion, answer=i.answer, tags=i.tags)) for i in inputs]
