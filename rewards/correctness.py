"""Rewards for correct answers."""

from __future__ import annotations

from configs.task import AnswerPlace
from rewards.answers import is_correct
from rewards.base import Tags


def exact_answer(
    completion: str, *, answer: str, tags: Tags, extraction: AnswerPlace | None = None
) -> float:
    """1 if the completion's answer equals the reference answer, else 0.

    `extraction` is that of `rewards.answers.find_answer`.
    """
    return float(is_correct(completion, answer=answer, tags=tags, extraction=extraction))
