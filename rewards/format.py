"""Rewards for the format of a completion, independent of its content."""

from __future__ import annotations

import re

from rewards.base import Tags


def well_formed(completion: str, *, stop_reason: str, tags: Tags) -> float:
    """1 if the completion is well formed and was not truncated, else 0."""
    return float(is_well_formed(completion, stop_reason=stop_reason, tags=tags))


def is_well_formed(completion: str, *, stop_reason: str, tags: Tags) -> bool:
    """Whether the completion is one reasoning part, one answer part and nothing else.

    White space around the parts is allowed. Both parts must be non-empty and contain no tag, and
    the completion must have ended with a stop token or a stop string. Used by rewards and
    evaluation.
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
