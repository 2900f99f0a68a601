"""Rewards for mathematics in LaTeX, compared by `math-verify` as expressions of SymPy.

math-verify is in the extra `rewards`. Its own time-outs use signals, which fail outside the main
thread (huggingface/Math-Verify#55), so they are off: expressions that take too long end with the
time limit of the reward process, which counts them as errors.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from rewards.answers import Extraction, find_answer
from rewards.base import Tags

try:
    from math_verify import parse, verify
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "run `make install-rewards`, or install math-verify", name=error.name
    ) from error

# It warns in each process that its time-outs are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


def latex_answer(
    completion: str, *, answer: str, tags: Tags, extraction: Extraction | None = None
) -> float:
    r"""1 if the completion's answer is mathematically equal to the reference, else 0.

    Both may be numbers, fractions, roots, expressions with variables, equations, intervals, sets,
    tuples and matrices; `$`, `\(` or `\boxed` around them is optional. A completion that cannot
    be parsed scores 0.

    >>> latex_answer(r"<answer>\frac{2}{4}</answer>", answer="0.5", tags=tags)
    1.0
    >>> latex_answer(r"so \boxed{(x+1)^2}", answer="$x^2 + 2x + 1$", tags=tags, extraction="boxed")
    1.0
    >>> latex_answer(r"<answer>\sqrt{3}</answer>", answer=r"\sqrt{2}", tags=tags)
    0.0

    Known hacks:
        the expression of the question instead of its value ("2+3" where 5 is asked): scores 1,
        because both are equal; use `rewards.numeric:numeric_answer` where references are numbers.
        several answers in one ("$4$ or $5$"): are a set, which equals no single number.
        a rounded value ("6.283185" for "2 pi"): scores 1; numbers are compared to six digits.
        an expression that takes for ever (`9^{9^{9^9}}`): is an error by time-out, which excludes
        the rollout instead of scoring it; the share of such errors is reported.

    Args:
        completion: the completion.
        answer: the reference answer.
        tags: the configured tags.
        extraction: where the answer is, if not as `prompt.answer` says; see
            `rewards.answers.find_answer`.

    Raises:
        ValueError: if the reference cannot be parsed.
    """
    reference = _reference(answer)
    if not reference:
        raise ValueError(f"the reference answer {answer[:200]!r} cannot be parsed as LaTeX")
    text = find_answer(completion, tags=tags, extraction=extraction)
    found = [] if text is None else _parse(text)
    return float(bool(found) and verify(reference, found, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)  # one reference has many completions
def _reference(answer: str) -> list[Any]:
    return _parse(answer)


def _parse(text: str) -> list[Any]:
    """The expressions of a text; empty if it has none."""
    if not any(delimiter in text for delimiter in _DELIMITERS):
        text = f"${text}$"  # math-verify finds LaTeX by its delimiters
    # By default unparsed text is a result too, and equals the same text.
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None)
