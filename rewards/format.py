"""Rewards for the form of a completion; what the parts say is judged elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rewards.base import RewardInput, Tags


def well_formed(inputs: Sequence[RewardInput]) -> list[float]:
    """1 where the completion has the asked-for form and ended by itself, else 0."""
    return [
        float(is_well_formed(i.completion, stop_reason=i.stop_reason, tags=i.tags)) for i in inputs
    ]


def is_well_formed(completion: str, *, stop_reason: str, tags: Tags) -> bool:
    """Whether the completion is one reasoning part, one answer part and nothing else.

    White space may stand around the parts. Each must say something, neither may hold a tag, and
    the completion must have ended by itself: with a stop token or a stop string. Rewards and
    evaluation both ask this.
    """
    if stop_reason == "length":
        return False
    any_tag = "|".join(re.escape(tag) for tag in vars(tags).values())
    part = rf"(?:(?!{any_tag}).)*"
    form = (
        rf"\s*{re.escape(tags.reasoning_open)}({part}){re.escape(tags.reasoning_close)}"
        rf"\s*{re.escape(tags.answer_open)}({part}){re.escape(tags.answer_close)}\s*"
    )
    match = re.fullmatch(form, completion, re.DOTALL)
    return match is not None and all(text.strip() for text in match.groups())
