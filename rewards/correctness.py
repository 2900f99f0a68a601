"""Rewards for correct answers."""

from __future__ import annotations

from rewards.answers import is_correct
from rewards.base import Tags


def exact_answer(completion: str, *, answer: str, tags: Tags) -> float:
    """1 if the last answer block equals the reference answer, else 0."""
    return float(is_correct(completion, answer=answer, tags=tags))
