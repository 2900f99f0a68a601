"""Extraction and comparison of answers."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from configs.task import AnswerPlace
from rewards.answers import (
    answer_key,
    extract_answer,
    find_answer,
    is_correct,
    last_number,
    parse_number,
    same_answer,
)
from rewards.base import Tags
from rewards.correctness import exact_answer

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


def test_tags_are_not_regular_expressions():
    tags = Tags("(", ")", "[.*", "*.]")
    assert extract_answer("[.*7*.] [ab 8 b.]", tags) == "7"
    same = Tags("", "", "$", "$")
    assert extract_answer("is $7$", same) == "7"


@given(st.text(), st.text(), st.text())
def test_an_answer_is_found_in_any_text(before: str, answer: str, after: str):
    before, answer, after = (text.replace("<", "") for text in (before, answer, after))
    completion = f"{before}<answer>{answer}</answer>{after}"
    assert extract_answer(completion, TAGS) == answer.strip()


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
        ("7 €", 7),
        ("7€.", 7),
        ("-1,234.50$", Fraction("-1234.5")),
        ("¥7", 7),
        ("₹ 7", 7),
        (r"\$7", 7),
        (r"7\$", 7),
        ("US$7", 7),
        (r"-US\$7.50", Fraction("-7.5")),
        ("12.", 12),
        ("12.50.", Fraction("12.5")),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        ("-6/4", Fraction(-3, 2)),
        ("9" * 90, int("9" * 90)),
        *((text, None) for text in ("", ".", "-", "$", "/2", "1/0", "1/00", "1.5/2", "1/2/3")),
        *(
            (text, None)
            for text in ("--3", "-$-5", "$5$", "€5 €", "US5", "US€5", "5 $ €", "$ 5  €")
        ),
        *(
            (text, None)
            for text in ("1,23", "1234,567", "12,", "1.2.3", "12..", "33 apples", "x=3")
        ),
        *((text, None) for text in ("3%", "1e3", "inf", "nan", "0x10", "½", "٣", "9" * 101)),
    ],
)
def test_numbers(text: str, number: Fraction | int | None):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1,234", "1234.0", True),
        ("1/2", "0.50", True),
        ("2/4", "1/2", True),
        ("3", "-3", False),
        ("33 apples", "33", False),
        ("€5", "$5", False),
        ("£5.00", "€5", False),
        ("$5.00", "$5", True),
        ("5", "$5", True),
        ("€5", "5 €", True),
        ("5€", "5.00 €", True),
        ("5", "¥5", True),
        ("₹5", "5", True),
        (r"\$5", "$5", True),
        ("US$5", "5$", True),
        (r"US\$5", "$5.00", True),
        ("$5$", "5", False),
        ("5 €", "$5", False),
        ("5 €", "5 $", False),
        ("¥5", "₹5", False),
        ("US$5", "€5", False),
        ("¥5", "6", False),
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
def test_all_notations_of_a_number_are_equal(number: int):
    for text in (f"{number:,}", f"{number}.", f"{number}.00", f"{number}/1", f" {number} "):
        assert same_answer(text, str(number))
    assert not same_answer(str(number), str(number + 1))


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("so <answer>$33.00</answer>", True),
        ("<answer>34</answer>", False),
        ("so 33", False),
        ("<answer></answer>", False),
        ("<answer>33</answer><answer>34</answer>", False),
    ],
)
def test_correctness_needs_an_answer_block(completion: str, right: bool):
    assert is_correct(completion, answer="33", tags=TAGS) is right
    assert exact_answer(completion, answer="33", tags=TAGS) == float(right)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48 + 24 = 72", "72"),
        ("He has 72 clips.", "72"),
        ("It costs $1,234.50.", "1234.50"),
        ("so 5...", "5"),
        ("**-7**", "-7"),
        ("\u22127", "-7"),
        ("between 5-10", "-10"),
        ("half: 1/2", "2"),
        ("1.2.3", "1.2.3"),
        ("7 is it. Yes...", "7"),
        ("$, . and -", None),
        ("", None),
        ("\u0667", None),  # a digit of another script
    ],
)
def test_the_last_number(text: str, number: str | None):
    assert last_number(text) == number


@given(st.text(alphabet="0123456789.,$- ab", max_size=30))
def test_the_last_number_is_that_of_lm_evaluation_harness(text: str):
    """Its regular expression and its ignored characters, whenever the result is a number."""
    matches = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)
    if not matches:
        assert last_number(text) is None
        return
    theirs = re.sub(r"\.$", "", re.sub(r"[,$]", "", "".join(matches[-1])))
    if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", theirs):
        assert last_number(text) == theirs


@given(st.text(max_size=8), st.text(max_size=8))
def test_answers_with_equal_keys_are_the_same(one: str, other: str):
    assert answer_key(one) == answer_key(f" {one} ".upper().lower()) or not one.isascii()
    if answer_key(one) == answer_key(other):
        currency = r"(?:US)?\\?\$|[€£¥₹]"
        assert same_answer(re.sub(currency, "", one), re.sub(currency, "", other))


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("completion", "5 \n\nno 6"),
        ("first_line", "5"),
        ("last_line", "no 6"),
        ("last_number", "6"),
        ("tags", None),
    ],
)
def test_an_answer_without_tags(place: AnswerPlace, found: str | None):
    tags = Tags.of(Prompt(answer=place, answer_prefix="A:"), stops=("Q:", "\n\n"))
    for end in ("", "\n", "Q:"):
        assert find_answer(f"A: \n5 \n\nno 6{end}", tags=tags) == found
    assert find_answer("A: \n ", tags=tags) is None
    assert find_answer("<answer>7</answer>", tags=tags, extraction="tags") == "7"


@pytest.mark.parametrize(
    ("stops", "completion", "found"),
    [
        (("END",), "7END", "7"),
        (("END",), "7END.", "7"),
        (("END",), "so 7 END.\n", "so 7"),
        (("END", "THE END"), "7 THE END!", "7"),
        (("END",), "7 END of it", "7 END of it"),  # words follow: it was not what ended it
        (("END",), "ENDURE 7END.", "ENDURE 7"),
        (("\n\n",), "5\n\n\n", "5"),
        (("\n\n",), "5\n\n6", "5"),
        (("##",), "7###", "7"),
        (("END",), "END.", None),
        (("END",), " \n", None),
        ((), "7END.", "7END."),
    ],
)
def test_a_stop_string_is_no_part_of_the_answer(
    stops: tuple[str, ...], completion: str, found: str | None
):
    tags = Tags.of(Prompt(answer="completion"), stops=stops)
    assert find_answer(completion, tags=tags) == found
