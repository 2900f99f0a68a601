"""Length and repetition: formulas, and the hacks that their docstrings list."""

from __future__ import annotations

import math
from typing import Any

import pytest

from configs.schema import Prompt
from rewards.base import Tags
from rewards.length import cosine_length, length_range
from rewards.repetition import line_repetition, ngram_repetition

TAGS = Tags.of(Prompt())


def cosine(completion: str, **arguments) -> float:
    given: dict[str, Any] = {
        "answer": "5",
        "stop_reason": "eos",
        "tags": TAGS,
        "maximum": 8,
    } | arguments
    return cosine_length(completion, **given)


def test_the_cosine_of_the_paper() -> None:
    right, wrong = "w w w <answer>5</answer>", "w w w <answer>6</answer>"
    # Half of the maximum: halfway between both values; a quarter: (1 + cos(pi / 4)) / 2 of the way.
    assert cosine(right, correct=(2.0, 1.0)) == pytest.approx(1.5)
    assert cosine(wrong, wrong=(-10.0, 0.0)) == pytest.approx(-5.0)
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert cosine(right, maximum=16, correct=(2.0, 1.0)) == pytest.approx(1 + quarter)
    assert cosine(right, stop_reason="length", overlong=-3.0) == -3
    assert cosine("w " * 9 + right) == -1


def test_hack_a_long_wrong_answer_stays_below_every_correct_one() -> None:
    assert cosine("no") < cosine("w " * 8) == -0.5 < cosine("w " * 7 + "<answer>5</answer>") == 0.5


def test_hack_white_space_has_no_length() -> None:
    for unit in ("words", "characters"):
        score = length_range("a b" + " \n" * 100, minimum=10, maximum=20, margin=10, unit=unit)
        assert score == pytest.approx(0.2)


def test_hack_repeated_words_fill_a_range_and_are_found_as_repetition() -> None:
    text = "word " * 15
    assert length_range(text, minimum=10, maximum=20, margin=5) == 1
    assert ngram_repetition(text) == pytest.approx(-11 / 12)


def test_hack_repetition_without_spaces_is_found_by_characters() -> None:
    assert ngram_repetition("ab" * 50) == 0
    assert ngram_repetition("ab" * 50, unit="characters", n=10) == pytest.approx(-89 / 91)


def test_hack_a_counter_hides_repetition_from_long_ngrams_only() -> None:
    text = " ".join(f"{n}. try again" for n in range(10))
    assert ngram_repetition(text, n=4) == 0
    assert ngram_repetition(text, n=2) == pytest.approx(-9 / 29)
    assert line_repetition(text.replace(" again ", " again\n")) == pytest.approx(-9 / 10)


def test_short_texts_have_no_repetition() -> None:
    assert [ngram_repetition(""), ngram_repetition("a b"), line_repetition("\n\n")] == [0, 0, 0]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="margin = 0"):
        length_range("", maximum=1, margin=0)
    with pytest.raises(ValueError, match="minimum = 2 and maximum = 1"):
        length_range("", minimum=2, maximum=1, margin=1)
    with pytest.raises(ValueError, match="n = 0"):
        ngram_repetition("", n=0)
