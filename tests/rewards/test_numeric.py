"""Numbers in many notations, and the hacks that `numeric_answer` lists."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from rewards.base import Tags
from rewards.numeric import numeric_answer
from rewards.quantities import Quantity, parse_quantity

TAGS = Tags.of(Prompt())


def score(text: str, answer: str, **arguments) -> float:
    return numeric_answer(f"<answer>{text}</answer>", answer=answer, tags=TAGS, **arguments)


def cases(name: str) -> list[dict[str, Any]]:
    lines = (Path(__file__).parent / "cases" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_completions_have_the_score_that_a_person_gives() -> None:
    rows = cases("numeric.jsonl")
    found = [numeric_answer(row["completion"], answer=row["answer"], tags=TAGS) for row in rows]
    assert [row for row, one in zip(rows, found, strict=True) if one != row["numeric_answer"]] == []


def test_answers_have_the_score_that_a_person_gives() -> None:
    """Right numbers in unusual notations, and texts in which the right number is not the answer."""
    rows = cases("numeric_more.jsonl")
    assert [row for row in rows if score(row["text"], row["answer"]) != row["score"]] == []


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("-$5", -5, "$"),
        ("\u22125 \u20ac", -5, "€"),
        ("-1 1/2 hours", Fraction(-3, 2), "h"),
        ("12.5%", Fraction(25, 2), "%"),
        ("$5 million", 5_000_000, "$"),
        ("5 dollars", 5, "$"),
        ("$5 an hour", 5, "$/h"),
        (r"5 \text{ cm}^2", 5, "cm^2"),
        ("5 square centimeters", 5, "cm^2"),
        ("5 cm^-1", 5, "cm^-1"),
        ("5 Red Marbles left", 5, "red marble"),
        *(
            (text, None, "")
            for text in ("", "five", "1,23", "1,234,56", "1/0", "+-5", "$", "1.2.3")
        ),
        *((text, None, "") for text in ("12:30", "5-6", "3 4", "5e", "1,5")),
    ],
)
def test_a_quantity(text: str, value: Fraction | None, unit: str) -> None:
    expected = None if value is None else Quantity(Fraction(value), unit)
    assert parse_quantity(text) == expected


@given(st.integers(-(10**15), 10**15))
def test_separators_and_decimals_do_not_change_a_number(number: int) -> None:
    for text in (f"{number:,}", f"{number}.00", f"{number:_}", f"{number} apples"):
        assert score(text, str(number)) == 1


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_scientific_notation_is_exact(number: float) -> None:
    found = parse_quantity(repr(number))
    assert found is not None
    assert found.value == Fraction(repr(number))


def test_tolerances() -> None:
    assert [score(text, "100", rel_tol=0.01) for text in ("101", "101.1")] == [1, 0]
    assert [score(text, "0", abs_tol=0.5) for text in ("-0.5", "0.6")] == [1, 0]
    assert score("0.33", "1/3") == 0


@pytest.mark.parametrize(
    ("text", "answer", "units", "right"),
    [
        ("5 km", "5", "match", 1),
        ("5 KM", "5 kilometers", "match", 1),
        ("5 km", "5 m", "match", 0),
        ("5 km", "5 miles", "match", 0),
        ("\u20ac5", "$5", "match", 0),
        ("5 \u00c4pfel", "5", "match", 0),
        ("5 \u00c4pfel", "5 \u00c4pfel", "match", 1),
        ("300 K", "300", "match", 0),
        ("300 K", "300 K", "match", 1),
        ("7 pairs", "7 pairs", "match", 1),
        ("14", "7 pairs", "match", 0),
        ("5%", "5 km", "match", 0),
        ("5 mW", "5 MW", "match", 0),
        ("5 megawatts", "5 MW", "match", 1),
        ("5", "5 km", "match", 1),
        ("5", "5 km", "require", 0),
        ("5 bananas", "5 km", "ignore", 1),
        ("5 dozen", "5 km", "ignore", 0),
    ],
)
def test_units(text: str, answer: str, units: Any, right: int) -> None:
    assert score(text, answer, units=units) == right


@pytest.mark.parametrize(
    ("text", "answer", "either", "fraction", "number"),
    [
        ("50%", "0.5", 1, 1, 0),
        ("50%", "1/2", 1, 1, 0),
        ("50%", "50", 1, 0, 1),
        ("50", "50%", 1, 0, 1),
        ("0.5", "50%", 1, 1, 0),
        ("50%", "50%", 1, 1, 1),
        ("5000%", "50%", 0, 0, 0),
        ("50", "0.5", 0, 0, 0),
    ],
)
def test_percent(text: str, answer: str, either: int, fraction: int, number: int) -> None:
    found = [score(text, answer, percent=how) for how in ("either", "fraction", "number")]
    assert found == [either, fraction, number]


def test_references_that_are_not_numbers_may_be_compared_as_text() -> None:
    assert [score(text, "True", non_numbers="text") for text in ("true", "false")] == [1, 0]


def test_hack_any_unit_counts_unless_units_are_required() -> None:
    assert [score("5 bananas", "5", units=units) for units in ("match", "require")] == [1, 0]


def test_hack_a_wide_tolerance_accepts_zero() -> None:
    assert score("0", "0.7", abs_tol=1.0) == 1


def test_hack_of_a_list_of_guesses_only_the_last_number_counts() -> None:
    text = "It is 1 2 3 4 5 6"
    found = [
        numeric_answer(text, answer=str(n), tags=TAGS, extraction="last_number")
        for n in range(1, 7)
    ]
    assert found == [0, 0, 0, 0, 0, 1]


def test_an_error_is_not_a_zero() -> None:
    with pytest.raises(ValueError, match="the reference answer 'many' is not a number"):
        score("5", "many")
    with pytest.raises(ValueError, match=r"rel_tol = -1 is not a finite number from 0"):
        score("5", "5", rel_tol=-1)
