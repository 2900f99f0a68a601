"""Rewards for mathematics in LaTeX, compared by `math-verify` as expressions of SymPy.

math-verify is in the extra `rewards`. Its own time-outs use signals, which fail outside the main
thread (huggingface/Math-Verify#55), so they are off: expressions that take too long end with the
time limit of the reward process, which counts them as errors.
"""

from __future__ import annotations

import functools
import logging
import re
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from configs.task import AnswerPlace
from rewards.answers import find_answer
from rewards.base import Tags
from rewards.numeric import is_same_unit, meanings
from rewards.quantities import PERCENT, Quantity, parse_quantity, raised, without_lead

try:
    from math_verify import parse, verify
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "run `make install-rewards`, or install math-verify", name=error.name
    ) from error

# It warns in each process that its time-outs are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_MOST_DIGITS = 2000
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
_VARIABLE = re.compile(r"\d[kKMB](?![A-Za-z])")
"""What multiplies a number in words, and is a variable in LaTeX."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORDS = re.compile(r"(?!(?:sqrt|frac|sin|cos|tan|log|ln|exp|pi)\b)[^\W\d_]{2,}")
_QUALIFIED = re.compile(
    r"\\(?:text|mathrm|mbox|not|neq?|approx|l?dots|cdots)(?![a-z])|\d\s*(?:[_'=]|\.\.)"
)
_TEXT = re.compile(r"\\[A-Za-z]+\s*(?:\{[A-Za-z ,.()'-]*\})?")
"""A command, and the text that it is given."""
_WORD = re.compile(r"(?!and\b|sqrt\b|frac\b|sin\b|cos\b|tan\b|log\b|exp\b)[^\W\d_]{3,}")
_MISREAD = re.compile(r"\d\s+[\d.]|\d\.\d+\.\d|\d[eE][+-]?\d")
"""What math-verify reads as a product of its parts."""


def latex_answer(
    completion: str, *, answer: str, tags: Tags, extraction: AnswerPlace | None = None
) -> float:
    r"""1 if the completion's answer is mathematically equal to the reference, else 0.

    Numbers with or without a unit are read as by `rewards.numeric:numeric_answer`: `12 000`,
    `1 1/2`, `1e3` and `50%` are numbers, and another unit is wrong. In `7k` and `7M` the letters
    are variables, and `(7)` is 7. All else is LaTeX, which math-verify reads: fractions, roots,
    expressions with variables, equations, intervals, sets, tuples and matrices; `$`, `\(` or
    `\boxed` around them is optional. A completion that cannot be parsed scores 0.

    >>> latex_answer(r"<answer>\frac{2}{4}</answer>", answer="0.5", tags=tags)
    1.0
    >>> latex_answer(r"so \boxed{(x+1)^2}", answer="$x^2 + 2x + 1$", tags=tags, extraction="boxed")
    1.0
    >>> latex_answer(r"<answer>\sqrt{3}</answer>", answer=r"\sqrt{2}", tags=tags)
    0.0
    >>> latex_answer("<answer>5 km</answer>", answer="5 miles", tags=tags)
    0.0

    Known hacks:
        the expression of the question instead of its value ("2+3" where 5 is asked): scores 1,
        because both are equal; use `rewards.numeric:numeric_answer` where references are numbers.
        several answers in one ("$4$ or $5$"): are a set, which equals no single number.
        words around an expression ("not $x$"): are not read, such an answer scores 1; where the
        reference is a number, it scores 0.
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
        ValueError: if the reference cannot be parsed, or is neither a number nor LaTeX, as `seven`
            or `12 000 x`, whose letters and numbers would be multiplied.
    """
    reference = _reference(answer)
    text = find_answer(completion, tags=tags, extraction=extraction)
    if text is None:
        return 0.0
    found = _quantity(text)
    if not isinstance(reference, Quantity):
        return float(_is_equal(reference, _parse(raised(text))))
    if found is not None:
        same = is_same_unit(found, reference) and any(
            _is_equal(_parse(_latex(right)), _parse(_latex(value)))
            for value, right in meanings(found, reference)
        )
        return float(same)
    if _says_more(text):
        return 0.0
    values = [reference.value, *([reference.value / 100] if reference.unit == PERCENT else [])]
    parsed = _parse(raised(text))
    return float(any(_is_equal(_parse(_latex(value)), parsed) for value in values))


@functools.lru_cache(maxsize=1024)  # one reference has many completions
def _reference(answer: str) -> Quantity | list[Any]:
    """The reference as a number with a unit, or else as expressions.

    Raises:
        ValueError: if it cannot be parsed, or would be parsed as something else.
    """
    number = None if "=" in answer else _quantity(answer)
    if number is not None:
        return number
    shown = f"the reference answer {answer[:200]!r}"
    if _has_words(answer) or _MISREAD.search(_TEXT.sub(" x ", answer)):
        raise ValueError(
            f"{shown} is neither a number nor LaTeX: its letters and numbers would be multiplied; "
            "write it in LaTeX, with words in \\text{...}"
        )
    found = _parse(raised(answer))
    if not found:
        raise ValueError(f"{shown} cannot be parsed as LaTeX")
    return found


def _quantity(text: str) -> Quantity | None:
    """A number with a unit; None for mathematics, in which parentheses have no sign."""
    plain = text.strip(" $")
    return None if plain.startswith("(") or _VARIABLE.search(plain) else parse_quantity(text)


def _says_more(text: str) -> bool:
    r"""Whether a text has more than mathematics, as `$5$ or six`, `5\text{k}` and `6 = 5`."""
    mathematics = _COMMAND.sub(" ", without_lead(text))
    return _QUALIFIED.search(text) is not None or _WORDS.search(mathematics) is not None


def _has_words(text: str) -> bool:
    """Whether a text outside of mathematics has words, which would be products of their letters."""
    is_delimited = any(delimiter in text for delimiter in _DELIMITERS)
    return not is_delimited and _WORD.search(_TEXT.sub(" ", text)) is not None


def _latex(value: Fraction) -> str:
    """A number as LaTeX, in decimals where it has an end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest > 1:
        return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(prec=_MOST_DIGITS):
        return f"{Decimal(value.numerator) / value.denominator:f}"


def _is_equal(reference: list[Any], found: list[Any]) -> bool:
    return bool(found) and verify(reference, found, timeout_seconds=None)


def _parse(text: str) -> list[Any]:
    """The expressions of a text; empty if it has none."""
    if not any(delimiter in text for delimiter in _DELIMITERS):
        text = f"${text}$"  # math-verify finds LaTeX by its delimiters
    # By default unparsed text is a result too, and equals the same text.
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None)
