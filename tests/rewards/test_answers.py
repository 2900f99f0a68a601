"""Extraction and comparison of answers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from configs.task import AnswerPlace
from rewards.answers import (
    answer_key,
    extract_answer,
    find_answer,
    last_number,
    parse_number,
    same_answer,
)
from rewards.base import Tags

TAGS = Tags.of(Prompt())


@pytest.mark.parametrize(
    ("place", "completion", "answer"),
    [
        # The last complete block counts.
        ("tags", "<reasoning>1</reasoning>\n<answer>\n 33 \n</answer>\n", "33"),
        ("tags", "<answer>1</answer> no, <answer>2</answer>", "2"),
        ("tags", "<answer>1</answer> or <answer>2", "1"),
        ("tags", "<answer>1 <answer>2</answer>", "2"),
        ("tags", "<answer>1", None),
        ("tags", "", None),
        ("tags", "<answer></answer>", ""),
        ("tags", "<ANSWER>1</ANSWER>", None),
        ("boxed", r"\boxed{1} then \boxed{ 2 }", "2"),
        ("boxed", r"\boxed{\frac{a}{\{b}}", r"\frac{a}{\{b}"),
        ("boxed", r"\boxed{\boxed{3}}", r"\boxed{3}"),
        ("boxed", r"\boxed{1} and \boxed{2", None),
        ("stated", "The answer is 12 km. Really.", "12 km"),
        ("stated", "answer: 1\nthe final answer is: **2**", "2"),
        ("stated", "**Answer:**\n\n`42`\nDone", "42"),
        ("stated", "the answers are 3", None),
        ("last_number", "It costs $1,234.50.", "1234.50"),
        ("last_number", "so 5...", "5"),
        ("last_number", "\u22127", "-7"),
        ("last_number", "between 5-10", "-10"),
        ("last_number", "half: 1/2", "2"),
        ("last_number", "1.2.3", "1.2.3"),
        ("last_number", "7 is it. Yes...", "7"),
        ("last_number", "$, . and -", None),
        ("last_number", "\u0667", None),  # a digit of another script
    ],
)
def test_where_an_answer_is(place: AnswerPlace, completion: str, answer: str | None):
    assert find_answer(completion, tags=TAGS, extraction=place) == answer


def test_tags_are_not_regular_expressions():
    tags = Tags("(", ")", "[.*", "*.]")
    assert extract_answer("[.*7*.] [ab 8 b.]", tags) == "7"
    same = Tags("", "", "$", "$")
    assert extract_answer("is $7$", same) == "7"


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "/2", "1/0", "1.5/2", "--3", "$5$", "€5 €", "US€5", "5 $ €", "1,23", "1234,567"),
        *("1.2.3", "12..", "33 apples", "x=3", "3%", "1e3", "inf", "½", "٣", "9" * 101),
    ],
)
def test_what_is_no_number(text: str):
    assert parse_number(text) is None


@given(st.integers(-(10**12), 10**12))
def test_all_notations_of_a_number_are_equal(number: int):
    for text in (f"{number:,}", f"{number}.", f"{number}.00", f"{number}/1", f" {number} "):
        assert same_answer(text, str(number))
    assert not same_answer(str(number), str(number + 1))


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
    [("completion", "5 \n\nno 6"), ("first_line", "5"), ("last_line", "no 6"), ("tags", None)],
)
def test_an_answer_without_tags(place: AnswerPlace, found: str | None):
    tags = Tags.of(Prompt(answer=place, answer_prefix="A:"), stops=("Q:", "\n\n"))
    for end in ("", "Q:"):
        assert find_answer(f"A: \n5 \n\nno 6{end}", tags=tags) == found
    assert find_answer("<answer>7</answer>", tags=tags, extraction="tags") == "7"


@pytest.mark.parametrize(
    ("stops", "completion", "found"),
    [
        (("END",), "7END", "7"),
        (("END",), "so 7 END.\n", "so 7"),
        (("END", "THE END"), "7 THE END!", "7"),
        (("END",), "7 END of it", "7 END of it"),  # words follow: it was not what ended it
        (("END",), "ENDURE 7END.", "ENDURE 7"),
        (("\n\n",), "5\n\n\n", "5"),
        (("\n\n",), "5\n\n6", "5"),
        (("END",), "END.", None),
        ((), "7END.", "7END."),
    ],
)
def test_a_stop_string_is_no_part_of_the_answer(
    stops: tuple[str, ...], completion: str, found: str | None
):
    tags = Tags.of(Prompt(answer="completion"), stops=stops)
    assert find_answer(completion, tags=tags) == found
