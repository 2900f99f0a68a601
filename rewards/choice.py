"""Rewards for multiple choice: the letter of the chosen option."""

from __future__ import annotations

import re

from configs.task import AnswerPlace
from rewards.answers import find_answer
from rewards.base import Tags


def choice_letter(
    completion: str,
    *,
    answer: str,
    tags: Tags,
    letters: str = "ABCDE",
    extraction: AnswerPlace | None = None,
) -> float:
    """1 if the completion chooses the letter of the reference, else 0.

    The letter may be written `B`, `b`, `(B)`, `B.`, `B)`, `**B**`, `B. Paris`, `(B) Paris`,
    `option B` or `answer: B`. An answer that names two letters chooses none.

    >>> choice_letter("<answer>(B) Paris</answer>", answer="B", tags=tags)
    1.0
    >>> choice_letter("It is A? No. Answer: C.", answer="C", tags=tags, extraction="stated")
    1.0
    >>> choice_letter("<answer>A, B, C, D</answer>", answer="B", tags=tags)
    0.0

    Known hacks:
        always the same letter: scores the letter's share of the references; shuffle the options.

    `letters` are those of the options; `extraction` is that of `rewards.answers.find_answer`.

    Raises:
        ValueError: if the reference is not one of the letters, in one of these forms.
    """
    reference = find_letter(answer, letters=letters)
    if reference is None:
        raise ValueError(f"the reference answer {answer[:100]!r} is not one letter of {letters!r}")
    text = find_answer(completion, tags=tags, extraction=extraction)
    return float(text is not None and find_letter(text, letters=letters) == reference)


def find_letter(text: str, *, letters: str) -> str | None:
    """The only option letter that the text chooses, in upper case; None if there is none.

    >>> find_letter("b) a dog", letters="ABCD")
    'B'
    """
    if not letters or not letters.isalnum():
        raise ValueError(f"letters = {letters!r} are not letters or digits")
    upper = f"[{letters.upper()}]"
    one = f"(?i:{upper})"
    begin = re.match(
        rf"""[\s*_`"'$]*
        (?:(?i:the\s+)?(?i:correct\s+|final\s+)*(?i:answer|option|choice)\s*(?i:is|:|=)?[\s*_`"'$]*)?
        (?:\(({one})\)|\[({one})\]|({one})(?=[).:\]*_`"'$]|\s*\Z))""",
        text,
        re.VERBOSE,
    )
    if begin is None:
        return None
    found = begin[begin.lastindex or 0].upper()
    rest = text[begin.end() :]
    # Others are marked, or are capitals that stand alone; "A dog" begins with an article.
    others = re.findall(
        rf"""[(\[]\s*({one})\s*[)\]] | \b({one})[)\]]
        | (?<![\w'])({upper})(?![\w'])(?!(?<=A)\s+[a-z])""",
        rest,
        re.VERBOSE,
    )
    named = {letter.upper() for groups in others for letter in groups if letter}
    return found if named <= {found} else None
