"""Answers: which block counts, which numbers are the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from rewards.answers import extract_answer, is_correct, parse_number, same_answer
from rewards.base import Tags

TAGS = Tags.of(Prompt())


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>33</answer>", "33"),
        ("<reasoning>1</reasoning>\n<answer>\n 33 \n</answer>\n", "33"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer></answer>", "1"),
        ("</answer>1<answer>", None),
        ("<answer>1", None),
        ("1</answer>", None),
        ("", None),
        ("<answer></answer>", ""),
        ("<answer>1</answer><answer> </answer>", ""),
        ("<ANSWER>1</ANSWER>", None),
    ],
)
def test_the_last_complete_block_counts(completion: str, answer: str | None):
    assert extract_answer(completion, TAGS) == answer


def test_tags_are_text_and_no_patterns():
    tags = Tags("(", ")", "[.*", "*.]")
    assert extract_answer("[.*7*.] [ab 8 b.]", tags) == "7"
    same = Tags("", "", "$", "$")
    assert extract_answer("is $7$", same) == "7"


@given(st.text(), st.text(), st.text())
def test_an_answer_is_found_in_any_text(before: str, answer: str, after: str):
    before, answer, after = (text.replace("<", "") for text in (before, answer, after))
    completion = f"{before}<answer>{answer}</answer>{after}"
    assert extract_answer(completion, TAGS) == answer.strip()


@given(st.text(alphabet="<>/answer 1", max_size=60))
def test_a_found_answer_stood_between_tags(text: str):
    answer = extract_answer(text, TAGS)
    if answer is not None:
        assert "<answer>" not in answer
        assert "</answer>" not in answer
        assert answer in text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("33", 33),
        (" 033 ", 33),
        ("-3", -3),
        ("\u22123", -3),
        ("- 3", -3),
        ("+3", 3),
        ("1,234", 1234),
        ("1,234,567.5", Fraction("1234567.5")),
        ("$12.00", 12),
        ("-$5", -5),
        ("$-5", -5),
        ("€ 7", 7),
        ("12.", 12),
        ("12.50.", Fraction("12.5")),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        ("-6/4", Fraction(-3, 2)),
        ("9" * 90, int("9" * 90)),
    ],
)
def test_numbers(text: str, number: Fraction | int):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ".",
            "-",
            "$",
            "/2",
            "1/0",
            "1/00",
            "1.5/2",
            "1/2/3",
            "--3",
            "-$-5",
            "1,23",
            "1234,567",
        ),
        *("12,", "1.2.3", "12..", "33 apples", "x=3", "3%", "1e3", "inf", "nan", "0x10", "½", "٣"),
        "9" * 101,
    ],
)
def test_no_numbers(text: str):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,234", "1234.0", True),
        ("1/2", "0.50", True),
        ("2/4", "1/2", True),
        ("3", "-3", False),
        ("33 apples", "33", False),
        ("Saint  Paul.", "saint\npaul", True),
        ("Straße", "STRASSE", True),
        ("Paris", "Lyon", False),
        ("x \u2212 1", "x - 1", True),
        ("", "0", False),
        ("0", "-0", True),
        ("9" * 101, "9" * 101, True),
    ],
)
def test_same_answers(one: str, other: str, same: bool):
    assert same_answer(one, other) is same
    assert same_answer(other, one) is same


@given(st.integers(-(10**12), 10**12))
def test_a_number_is_itself_however_it_is_written(number: int):
    for text in (f"{number:,}", f"{number}.", f"{number}.00", f"{number}/1", f" {number} "):
        assert same_answer(text, str(number))
    assert not same_answer(str(number), str(number + 1))


@given(st.text(max_size=30))
def test_every_text_equals_itself(text: str):
    assert same_answer(text, text)


def test_correctness_needs_an_answer_block():
    assert is_correct("so <answer>$33.00</answer>", answer="33", tags=TAGS)
    assert not is_correct("so 33", answer="33", tags=TAGS)
    assert not is_correct("<answer></answer>", answer="33", tags=TAGS)
    assert not is_correct("<answer>33</answer><answer>34</answer>", answer="33", tags=TAGS)
