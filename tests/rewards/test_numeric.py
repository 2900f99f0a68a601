"""Numbers in many notations, and the hacks that `numeric_answer` lists."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from rewards.base import Tags
from rewards.numeric import Quantity, numeric_answer, parse_quantity

TAGS = Tags.of(Prompt())


def score(text: str, answer: str, **arguments) -> float:
    return numeric_answer(f"<answer>{text}</answer>", answer=answer, tags=TAGS, **arguments)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("5", 5, ""),
        ("5.", 5, ""),
        (".5", Fraction(1, 2), ""),
        ("-$5", -5, "$"),
        ("\u22125 \u20ac", -5, "€"),
        ("1,234.5", Fraction(2469, 2), ""),
        ("1 000 000", 1_000_000, ""),
        ("1'000", 1000, ""),
        ("-3/4", Fraction(-3, 4), ""),
        ("-1 1/2 hours", Fraction(-3, 2), "hour"),
        (r"$1\frac{1}{2}$", Fraction(3, 2), ""),
        (r"\boxed{7}", 7, ""),
        ("1.2E-3", Fraction(12, 10_000), ""),
        ("3 \u00d7 10^{2} m", 300, "m"),
        (r"3\times10^{-2}", Fraction(3, 100), ""),
        ("12.5%", Fraction(1, 8), ""),
        ("50 percent", Fraction(1, 2), ""),
        ("$5 million", 5_000_000, "$"),
        ("5 dollars", 5, "$"),
        ("x = 5", 5, ""),
        ("about 5 m/s", 5, "m/s"),
        (r"5 \text{ cm}^2", 5, "cm ^2"),
        ("5 cm^-1", 5, "cm^-1"),
    ],
)
def test_a_quantity(text: str, value: Fraction, unit: str) -> None:
    assert parse_quantity(text) == Quantity(Fraction(value), unit)


@pytest.mark.parametrize(
    "text",
    ["", "five", "1,23", "1,234,56", "1/0", "+-5", "$", "1.2.3", "12:30", "5-6", "3 4", "5e", "٣"],
)
def test_what_is_not_a_number_with_a_unit(text: str) -> None:
    found = parse_quantity(text)
    assert found is None or (text, found.unit) == ("5e", "e")


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


def test_units() -> None:
    assert [score("5 km", answer) for answer in ("5", "5 KM", "5 m")] == [1, 1, 0]
    assert [score("5", "5 km", units=units) for units in ("match", "require")] == [1, 0]
    assert score("5 bananas", "5 km", units="ignore") == 1


def test_percent() -> None:
    assert [score("50%", answer) for answer in ("0.5", "1/2", "50%", "50")] == [1, 1, 1, 0]
    assert score("50%", "50", percent="number") == 1


@pytest.mark.parametrize("text", ["4 or 5", "4, 5", "4 5", "[4, 5]", "2+3", "10/2/1", "5 6 7"])
def test_hack_several_numbers_and_expressions_score_zero(text: str) -> None:
    assert score(text, "5") == 0


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
    with pytest.raises(ValueError, match=r"rel_tol = -1 .*; units = 'x' is not match"):
        score("5", "5", rel_tol=-1, units="x")
