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
_FACTOR = (
    r"\\(?:pi|sqrt|[dt]?frac|binom|left|sin|cos|tan|cot|sec|csc|log|ln|exp|alpha|beta|gamma|delta"
    r"|theta|(?:var)?phi|lambda|mu|rho|sigma|tau|omega|epsilon|infty|vec|mathbf|mathrm)(?![a-z])"
)
_REFUSED = (
    (
        re.compile(
            r"(?<![\d.^_}])\d+\s*\\[dt]?frac\s*(?:\d|\{\s*\d+\s*\})\s*(?:\d|\{\s*\d+\s*\})"
            rf"(?:\s|\\[,;:! ])*(?:{_FACTOR}|[A-Za-z(])"
        ),
        "has a mixed number before a factor, which would be a product; write it as one fraction",
    ),
    (
        re.compile(r"\d\.?\s*\\(?:overline|bar|dot)(?![a-z])|\d\.\d*\(\d+\)"),
        "has repeating decimals, which are not read; write it as a fraction",
    ),
    (
        re.compile(r"\d\s*_"),
        "has digits with an index, as of another base, which is not read; write it without",
    ),
    (
        re.compile(r"[\d}]\s*\\(?:text|mbox|mathrm)\s*\{(?!\s*(?:and|or)\s*\})[^{}]*\}\s*\d"),
        "has a number after words, which is not read; write one number with one unit",
    ),
)
"""What math-verify reads as something else, and what to do about it."""
_PART = re.compile(
    r"(?P<number>(?<![\d.,^_])\d{1,3}(?:(?:\{,\}|,\\!|,|\\[,:; ])\d{3})+(?!\d|,\d))"
    r"|\\\\|\\[()\[\]]|(?P<open>\\\{|\\l(?:brace|angle|brack)(?![a-z])|[(\[])"
    r"|(?P<close>\\\}|\\r(?:brace|angle|brack)(?![a-z])|[)\]])|(?P<brace>\{)|(?P<end>\})"
)
"""A number with thousands separators, or a bracket."""
_SPACED = re.compile(r"\{,\}|,\\!|\\[,:; ]")
"""Thousands separators that separate nothing else."""
_ARGUMENT = re.compile(r"[\w}\]^]\s*$")
"""What precedes the braces of an argument; other braces are those of a set."""
_ROOT = re.compile(r"√\s*(?:(\d+(?:\.\d+)?|[^\W\d_])|\(([^()]*)\)|\{([^{}]*)\})")
_SAID = re.compile(
    r"\\(?:text|textrm|mbox)\s*\{([^{}]*)\}(\^\{?\d\}?)?(?!\s*[=:])"
    r"|\\mathrm\s*\{([^{}]{2,})\}(\^\{?\d\}?)?[\s$.]*$"
)
"""Words in mathematics, with the power of a unit."""


def latex_answer(
    completion: str, *, answer: str, tags: Tags, extraction: AnswerPlace | None = None
) -> float:
    r"""1 if the completion's answer is mathematically equal to the reference, else 0.

    Numbers with or without a unit are read as by `rewards.numeric:numeric_answer`, but for `7k` and
    `7M`, whose letters are variables, and `(7)`, which is 7; another unit is wrong. All else is
    LaTeX, which math-verify reads: fractions, roots, expressions with variables, equations,
    intervals, sets, tuples and matrices; `$`, `\(` or `\boxed` around them is optional. A
    completion that cannot be parsed scores 0.

    >>> latex_answer(r"<answer>\frac{2}{4}</answer>", answer="0.5", tags=tags)
    1.0
    >>> latex_answer(r"so \boxed{(x+1)^2}", answer="$x^2 + 2x + 1$", tags=tags, extraction="boxed")
    1.0
    >>> latex_answer(r"<answer>\sqrt{3}</answer>", answer=r"\sqrt{2}", tags=tags)
    0.0
    >>> latex_answer("<answer>5 km</answer>", answer="5 miles", tags=tags)
    0.0
    >>> latex_answer("<answer>12000x</answer>", answer="12{,}000x", tags=tags)
    1.0

    Known hacks:
        the expression of the question instead of its value ("2+3" where 5 is asked): scores 1,
        because both are equal; use `rewards.numeric:numeric_answer` where references are numbers.
        words around an expression ("not $x$"): are not read, such an answer scores 1; where the
        reference is a number, it scores 0.
        a rounded value ("6.283185" for "2 pi"): scores 1; numbers are compared to six digits.
        an expression that takes for ever (`9^{9^{9^9}}`): is an error by time-out, which excludes
        the rollout instead of scoring it; the share of such errors is reported.

    `extraction` is that of `rewards.answers.find_answer`.

    Raises:
        ValueError: if the reference cannot be parsed; is neither a number nor LaTeX, as `seven` or
            `12 000 x`, whose letters and numbers would be multiplied; or is read as something else,
            as `2\frac13\pi`, `0.\overline{3}` and `4210_5`.
    """
    reference = _reference(answer)
    text = find_answer(completion, tags=tags, extraction=extraction)
    if text is None:
        return 0.0
    text = _joined(text)
    found = _quantity(text)
    if not isinstance(reference, Quantity):
        return float(_says_same(text, answer) and _is_equal(reference, _parse(raised(text))))
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
    """The reference as a number with a unit, or else as expressions; see `latex_answer`."""
    shown = f"the reference answer {answer[:200]!r}"
    answer = _joined(answer)
    number = None if "=" in answer else _quantity(answer)
    if number is not None:
        return number
    for refused, why in _REFUSED:
        if refused.search(answer):
            raise ValueError(f"{shown} {why}")
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


def _joined(text: str) -> str:
    r"""The text with `12,000` as `12000`, but in tuples, sets and intervals, and `√2` as LaTeX."""
    lists = list[bool]()  # for each open bracket: whether it, or one around it, is of a list

    def replaced(match: re.Match[str]) -> str:
        if match["number"]:
            number = _SPACED.sub("", match["number"])
            return number if lists[-1:] == [True] else number.replace(",", "")
        if match["brace"]:
            before = text[max(0, match.start() - 9) : match.start()]
            lists.append(lists[-1:] == [True] or _ARGUMENT.search(before) is None)
        elif match["open"] or (match["close"] == "]" and not lists):  # ]1,200[ is an interval
            lists.append(True)
        elif (match["close"] or match["end"]) and lists:
            lists.pop()
        return match.group()

    joined = _PART.sub(replaced, text)
    return _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2] or root[3]}}}", joined)


def _says_same(text: str, reference: str) -> bool:
    r"""Whether the words in mathematics, as in `\pi\text{ cm}`, are those of the reference.

    Missing words are accepted, and so is a unit where the reference has none.
    """
    said, expected = _said(text), _said(reference)
    if not said or said.casefold() == expected.casefold():
        return True
    one, other = parse_quantity(f"2 {said}"), parse_quantity(f"2 {expected}")
    if one is None or other is None or not one.value == other.value == 2:
        return False
    return is_same_unit(one, other)


def _said(text: str) -> str:
    words = (
        (one[1] or one[3] or "").strip() + (one[2] or one[4] or "") for one in _SAID.finditer(text)
    )
    return " ".join(word for word in words if word not in {"", "and", "or"})


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
