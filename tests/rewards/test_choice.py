"""Choice letters, and the hacks that `choice_letter` lists."""

from __future__ import annotations

import pytest

from configs.schema import Prompt
from rewards.base import Tags
from rewards.choice import choice_letter, find_letter

TAGS = Tags.of(Prompt())


@pytest.mark.parametrize(
    "text",
    [
        "B", " b ", "(B)", "[b]", "B.", "B)", "b) a dog", "**B**", "$B$", "B. A dog", "(B) Paris",
        "option B", "The correct answer is (B).", "Answer: B", "B: Bob's house",
    ],
)  # fmt: skip
def test_a_letter_is_found(text: str) -> None:
    assert find_letter(text, letters="ABCDE") == "B"


@pytest.mark.parametrize("text", ["", "Because", "A dog", "F", "Paris", "C++", "B is right"])
def test_text_that_names_no_letter(text: str) -> None:
    assert find_letter(text, letters="ABCDE") is None


@pytest.mark.parametrize(
    "text",
    ["A B C D", "A, B", "a, b, c, d", "A or B", "(A) (B)", "a) b) c)", "B.C.", "B) or C", "A/B/C"],
)
def test_hack_naming_several_letters_scores_zero(text: str) -> None:
    for answer in "ABCD":
        completion = f"<answer>{text}</answer>"
        assert choice_letter(completion, answer=answer, tags=TAGS) == 0


def test_hack_of_several_answers_the_last_one_counts() -> None:
    text = "<answer>A</answer><answer>B</answer><answer>C</answer>"
    assert [choice_letter(text, answer=letter, tags=TAGS) for letter in "ABC"] == [0, 0, 1]
    stated = "Answer: A\nAnswer: C"
    found = [choice_letter(stated, answer=a, tags=TAGS, extraction="stated") for a in "AC"]
    assert found == [0, 1]


def test_an_error_is_not_a_zero() -> None:
    with pytest.raises(ValueError, match="the reference answer 'F' is not one letter of 'ABCDE'"):
        choice_letter("<answer>B</answer>", answer="F", tags=TAGS)
