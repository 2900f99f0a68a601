"""Rewards for numeric answers: numbers in many notations, with units and a tolerance.

`rewards.correctness:exact_answer` is stricter.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from configs.task import AnswerPlace
from rewards.answers import find_answer, same_answer
from rewards.base import Tags
from rewards.quantities import PERCENT, Quantity, parse_quantity

Percent = Literal["either", "fraction", "number"]
Units = Literal["match", "ignore", "require"]
NonNumbers = Literal["refuse", "text"]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SHOWN = 200


def numeric_answer(
    completion: str,
    *,
    answer: str,
    tags: Tags,
    extraction: AnswerPlace | None = None,
    rel_tol: Tolerance = 0.0,
    abs_tol: Tolerance = 0.0,
    units: Units = "match",
    percent: Percent = "either",
    non_numbers: NonNumbers = "refuse",
) -> float:
    r"""1 if the completion's answer is the reference's number, else 0.

    An answer is one number in any common notation, with at most a lead-in, a sign, a currency or a
    true equation before it and a unit or the name of things in the plural after it; "Numbers" in
    docs/rewards.md has the notations. Expressions, several numbers, and numbers with words that
    change, deny or qualify them (`7 squared`, `7 is wrong`, `at least 7`) score 0.

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
        any thing in the plural, where the reference has no unit ("5 bananas"): scores 1 unless
        units = "require". It may be nonsense ("5 ideas"), which does not change the number.
        a percent sign where it is not known whether the reference is a share: "25%" is right for
        25 and for 0.25, unless `percent` says which.
        a wide tolerance: `abs_tol = 1` accepts 0 for every small reference.

    Args:
        completion: the completion.
        answer: the reference answer, in one of these notations.
        tags: the configured tags.
        extraction: see `rewards.answers.find_answer`.
        rel_tol: accepted distance as a share of the reference.
        abs_tol: accepted distance; the larger of both counts.
        units: match: two units must be equal, a missing one is accepted; ignore: any unit is
            accepted; require: the units must be equal. Case, a plural s and the names of a symbol
            are ignored; units are not converted.
        percent: either: where one of the two has a percent sign, 50% is 0.5 and 50; fraction: 50%
            is 0.5; number: 50% is 50.
        non_numbers: reference answers that are not numbers: refuse: an error; text: compared as
            by `exact_answer`, for evaluation sets of another kind.

    Raises:
        ValueError: if the reference is not a number.
    """
    text, reference = find_answer(completion, tags=tags, extraction=extraction), _reference(answer)
    if reference is None:
        if non_numbers == "refuse":
            raise ValueError(f"the reference answer {answer[:_SHOWN]!r} is not a number")
        return float(text is not None and same_answer(text, answer))
    found = None if text is None else parse_quantity(text)
    if found is None or not is_same_unit(found, reference, units=units):
        return 0.0
    is_near = any(
        abs(value - right) <= max(Fraction(rel_tol) * abs(right), Fraction(abs_tol))
        for value, right in meanings(found, reference, percent=percent)
    )
    return float(is_near)


@functools.lru_cache(maxsize=1024)  # one reference has many completions
def _reference(answer: str) -> Quantity | None:
    return parse_quantity(answer)


def meanings(
    found: Quantity, reference: Quantity, *, percent: Percent = "either"
) -> list[tuple[Fraction, Fraction]]:
    """The pairs of numbers that two quantities may mean; one pair without percent signs."""
    if percent == "either" and found.unit == reference.unit:  # 2500% is not 25%
        percent = "number"
    return [
        (value, right) for value in _values(found, percent) for right in _values(reference, percent)
    ]


def is_same_unit(found: Quantity, reference: Quantity, *, units: Units = "match") -> bool:
    """Whether the unit of an answer counts as that of the reference; see `numeric_answer`."""
    one, other = found.unit, reference.unit
    if one == other or {one, other} == {"", PERCENT}:
        return True
    if not found.is_plain or units == "require" or PERCENT in {one, other}:
        return False
    return units == "ignore" or not (one and other)


def _values(quantity: Quantity, percent: Percent) -> tuple[Fraction, ...]:
    if quantity.unit != PERCENT or percent == "number":
        return (quantity.value,)
    share = quantity.value / 100
    return (share,) if percent == "fraction" else (quantity.value, share)
