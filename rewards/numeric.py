"""Rewards for numeric answers: numbers in many notations, with units and a tolerance.

`rewards.correctness:exact_answer` is stricter. Nothing is computed: an expression is not a number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rewards.answers import Extraction, find_answer
from rewards.base import Tags

_LONGEST = 200
_MINUS = str.maketrans("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-" * 7)
_CURRENCY = "$€£¥₹"
_PERCENT = ("%", "percent", "per cent", "pct")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ALIASES = {"dollar": "$", "usd": "$", "euro": "€", "eur": "€"}
# LaTeX that surrounds or separates a number; mathematics is for rewards/latex.py.
_LATEX = (
    (re.compile(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}"), r" \1/\2"),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|boxed)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,!:; ]"), ""),
)
_QUANTITY = re.compile(
    rf"""
    (?:[A-Za-z]?\s*=|≈|~|about\b|approximately\b)?\s*
    (?P<sign>[+-]?)\s?(?P<currency>[{_CURRENCY}]?)\s?(?P<inner>[+-]?)
    (?:
        (?:(?P<mixed>\d{{1,20}})\s+)?(?P<over>\d{{1,20}})\s?/\s?(?P<under>\d{{1,20}})
        |
        (?P<whole>
            \d{{1,3}}(?P<separator>[,_' \u00a0\u2009\u202f])\d{{3}}(?:(?P=separator)\d{{3}})*|\d+
        )?
        (?P<part>\.\d+)?\.?
        (?:[eE](?P<e>[+-]?\d{{1,3}})
          |\s*(?:[x\u00d7*\u00b7]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{{?(?P<ten>[+-]?\d{{1,3}})\}}?)?
    )
    \s*(?P<unit>[^\s\d.,;:=+<>?!|-](?:[^\d,;:=+<>?!|]|(?<=[A-Za-z^])-?\d){{0,40}})?
    """,
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True)
class Quantity:
    """A number and its unit; the unit is "" if there is none."""

    value: Fraction
    unit: str


def numeric_answer(
    completion: str,
    *,
    answer: str,
    tags: Tags,
    extraction: Extraction | None = None,
    rel_tol: float = 0.0,
    abs_tol: float = 0.0,
    units: Literal["match", "ignore", "require"] = "match",
    percent: Literal["fraction", "number"] = "fraction",
) -> float:
    r"""1 if the completion's answer is the reference's number, else 0.

    Numbers may have a sign, a currency sign, thousands separators (`,` `_` `'` or a space),
    decimals, an exponent (`1.2e3`, `1.2 x 10^3`), `thousand` to `trillion`, a percent sign and a
    unit of up to 40 characters, or be fractions (`3/4`, `\frac{3}{4}`) and mixed numbers
    (`1 1/2`). An answer that is something else, such as two numbers or an expression, scores 0.

    >>> numeric_answer("<answer>$1,234.50</answer>", answer="1234.5", tags=tags)
    1.0
    >>> numeric_answer("so \\boxed{1\\frac{1}{2}} km", answer="1.5", tags=tags, extraction="boxed")
    1.0
    >>> numeric_answer("The answer is 50%.", answer="1/2", tags=tags, extraction="stated")
    1.0
    >>> numeric_answer("<answer>5 km</answer>", answer="5 miles", tags=tags)
    0.0
    >>> numeric_answer("<answer>3.14</answer>", answer="3.14159", tags=tags, rel_tol=0.01)
    1.0

    Known hacks:
        several numbers in one answer ("4 or 5"): scores 0.
        copying the expression of the question ("2+3"): scores 0, nothing is computed.
        a wide tolerance: `abs_tol = 1` accepts 0 for every small reference.
        any unit, where the reference has none ("5 bananas"): scores 1 unless units = "require".
        `extraction = "last_number"` takes the last number of any text, also of a list of guesses;
        only the last one counts.

    Args:
        completion: the completion.
        answer: the reference answer, a number in one of the notations above.
        tags: the configured tags.
        extraction: where the answer is, if not as `prompt.answer` says; see
            `rewards.answers.find_answer`.
        rel_tol: accepted distance as a share of the reference.
        abs_tol: accepted distance; the larger of both counts.
        units: match: two units must be equal, a missing one is accepted; ignore: any unit is
            accepted; require: the units must be equal. Case and a plural s are ignored; units
            are not converted.
        percent: fraction: 50% is 0.5; number: 50% is 50.

    Raises:
        ValueError: if the reference is not a number, or an argument is invalid.
    """
    _check(rel_tol=rel_tol, abs_tol=abs_tol, units=units, percent=percent)
    reference = _reference(answer, percent=percent)
    text = find_answer(completion, tags=tags, extraction=extraction)
    found = None if text is None else parse_quantity(text, percent=percent)
    if found is None or not _same_unit(found.unit, reference.unit, units=units):
        return 0.0
    return float(_is_near(found.value, reference.value, rel_tol=rel_tol, abs_tol=abs_tol))


def _reference(answer: str, *, percent: Literal["fraction", "number"]) -> Quantity:
    found = parse_quantity(answer, percent=percent)
    if found is None:
        raise ValueError(f"the reference answer {answer[:_LONGEST]!r} is not a number")
    return found


def _is_near(found: Fraction, reference: Fraction, *, rel_tol: float, abs_tol: float) -> bool:
    return abs(found - reference) <= max(Fraction(rel_tol) * abs(reference), Fraction(abs_tol))


def parse_quantity(
    text: str, *, percent: Literal["fraction", "number"] = "fraction"
) -> Quantity | None:
    """Parses a number with an optional unit; None if the text is something else.

    >>> parse_quantity("-1,234.5 km/h")
    Quantity(value=Fraction(-2469, 2), unit='km/h')
    """
    if len(text) > _LONGEST:
        return None
    text = text.translate(_MINUS).strip().strip("*_`").strip().rstrip(".")
    for latex, plain in _LATEX:
        text = latex.sub(plain, text)
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text.strip("$").strip()
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    value = _value(match)
    if value is None:
        return None
    unit = " ".join((match["unit"] or "").casefold().split())
    first, _, others = unit.partition(" ")
    if first in _SCALES:
        unit, value = others, value * _SCALES[first]
    if unit in _PERCENT:
        return Quantity(value / 100 if percent == "fraction" else value, "")
    return Quantity(value, f"{match['currency']} {_unit(unit)}".strip())


def _value(match: re.Match[str]) -> Fraction | None:
    if match["over"]:
        if int(match["under"]) == 0:
            return None
        value = int(match["mixed"] or 0) + Fraction(int(match["over"]), int(match["under"]))
    elif match["whole"] or match["part"]:
        whole = re.sub("[^0-9]", "", match["whole"] or "0")
        exponent = int(match["e"] or match["ten"] or 0)
        value = Fraction(f"{whole}{match['part'] or ''}") * Fraction(10) ** exponent
    else:
        return None
    return -value if "-" in match["sign"] + match["inner"] else value


def _unit(text: str) -> str:
    unit = text.rstrip(".")
    singular = unit.removesuffix("s") if len(unit) > 2 and unit[-2].isalpha() else unit
    return _ALIASES.get(singular, singular)


def _same_unit(found: str, reference: str, *, units: str) -> bool:
    if units == "ignore" or found == reference:
        return True
    return units == "match" and not (found and reference)


def _check(*, rel_tol: float, abs_tol: float, units: str, percent: str) -> None:
    wrong = [
        f"{name} = {value} is not a finite number from 0"
        for name, value in (("rel_tol", rel_tol), ("abs_tol", abs_tol))
        if not (math.isfinite(value) and value >= 0)
    ]
    if units not in {"match", "ignore", "require"}:
        wrong.append(f"units = {units!r} is not match, ignore or require")
    if percent not in {"fraction", "number"}:
        wrong.append(f"percent = {percent!r} is not fraction or number")
    if wrong:
        raise ValueError("; ".join(wrong))
