"""Rewards for the format of a completion, independent of its content."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import PositiveInt

from rewards.answers import find_answer
from rewards.base import Tags


def well_formed(completion: str, *, stop_reason: str, tags: Tags) -> float:
    """1 if the completion is well formed, else 0; see `is_well_formed`."""
    return float(is_well_formed(completion, stop_reason=stop_reason, tags=tags))


def is_well_formed(completion: str, *, stop_reason: str, tags: Tags) -> bool:
    """Whether the completion is one reasoning part, one answer part and nothing else.

    White space around the parts is allowed. Both parts must be non-empty and contain no tag, and
    the completion must have ended with a stop token or a stop string. Without answer tags
    (`prompt.answer`) it must have ended so, with an answer that is not empty; of a first line only
    the line must have ended. Used by rewards and evaluation.
    """
    if stop_reason == "length":
        begun = completion.removeprefix(tags.prefix).lstrip()
        return tags.answer == "first_line" and "\n" in begun
    if tags.answer != "tags":
        return bool(find_answer(completion, tags=tags))
    any_tag = "|".join(map(re.escape, tags.pairs))
    part = rf"(?:(?!{any_tag}).)*"
    form = (
        rf"\s*{re.escape(tags.reasoning_open)}({part}){re.escape(tags.reasoning_close)}"
        rf"\s*{re.escape(tags.answer_open)}({part}){re.escape(tags.answer_close)}\s*"
    )
    match = re.fullmatch(form, completion, re.DOTALL)
    return match is not None and all(text.strip() for text in match.groups())


def tag_pairs(completion: str, *, tags: Tags) -> dict[str, float]:
    """0.5 for the pair of reasoning tags and 0.5 for the pair of answer tags, by name.

    A pair counts if both of its tags occur exactly once, in order, with text between them; the
    answer's only if no reasoning tag follows its opening tag. Other text is allowed anywhere,
    unlike in `well_formed`, so that a model without the format finds its parts one by one.

    >>> tag_pairs("<reasoning>1 + 1</reasoning> <answer>2</answer>", tags=tags)
    {'reasoning': 0.5, 'answer': 0.5}
    >>> tag_pairs("1 + 1 <answer>2</answer>", tags=tags)
    {'reasoning': 0.0, 'answer': 0.5}

    Known hacks:
        nonsense between the tags: scores 1; combine this part with one for the content.

    Raises:
        ValueError: if the answer is not in tags.
    """
    if tags.answer != "tags":
        raise ValueError(f'there are no tags with prompt.answer = "{tags.answer}"')
    last = max(completion.rfind(tag) for tag in (tags.reasoning_open, tags.reasoning_close))
    reasoning = _between(completion, tags.reasoning_open, tags.reasoning_close)
    answer = _between(completion, tags.answer_open, tags.answer_close)
    follows = answer and completion.find(tags.answer_open) > last
    return {"reasoning": 0.5 if reasoning else 0.0, "answer": 0.5 if follows else 0.0}


def _between(completion: str, opening: str, closing: str) -> bool:
    """Whether both tags occur once, in order, with text between them."""
    if completion.count(opening) != 1 or completion.count(closing) != 1:
        return False
    begin = completion.find(opening) + len(opening)
    return bool(completion[begin : completion.find(closing)].strip())


class Pattern:
    r"""Scores the matches of a regular expression.

    >>> Pattern(r"\d+ apples")("I have 3 apples.")
    1.0
    >>> Pattern(r"\d+ apples", match="full")("I have 3 apples.")
    0.0
    >>> Pattern(r"(?m)^Step \d+:", match="count", maximum=4)("Step 1: add\nStep 2: check")
    0.5

    Known hacks:
        the shortest text that matches, and nothing else: scores 1.
        empty steps, with "count".
        a pattern with nested repetition, `(a+)+b`, can take minutes for some texts: that is a
        time-out, an error that excludes the rollout.

    Args:
        pattern: a regular expression of Python's `re`; flags are written in it, e.g. `(?is)`.
        match: search: 1 if it matches somewhere, else 0; full: 1 if it matches all of the text,
            else 0; count: the number of matches up to `maximum`, divided by it.
        maximum: the number of matches that scores 1.

    Raises:
        re.error: if the pattern is none.
    """

    def __init__(
        self,
        pattern: str,
        *,
        match: Literal["search", "full", "count"] = "search",
        maximum: PositiveInt = 1,
    ) -> None:
        self._pattern = re.compile(pattern)
        self._match, self._maximum = match, maximum

    def __call__(self, completion: str) -> float:
        """The score of a completion, from 0 to 1."""
        if self._match == "count":
            found = zip(range(self._maximum), self._pattern.finditer(completion), strict=False)
            return sum(1 for _ in found) / self._maximum
        search = self._pattern.search if self._match == "search" else self._pattern.fullmatch
        return float(search(completion) is not None)
