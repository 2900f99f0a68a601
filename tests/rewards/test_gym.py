"""Scores of reasoning-gym's own datasets, and the hacks that `score_answer` lists."""

from __future__ import annotations

import json

import pytest

from configs.schema import Prompt
from pipeline.data.procedural import generate_rows
from rewards.base import Tags
from rewards.gym import score_answer

TAGS = Tags.of(Prompt())


def item(name: str, answer: str | None, **metadata) -> str:
    entry = {"question": "?", "answer": answer, "metadata": {"source_dataset": name, **metadata}}
    return json.dumps(entry)


def score(text: str, entry: str, **arguments) -> float:
    return score_answer(f"<answer>{text}</answer>", entry=entry, tags=TAGS, **arguments)


@pytest.mark.parametrize("name", ["chain_sum", "rearc", "knights_knaves", "prime_factorization"])
def test_the_reference_has_the_full_score_after_the_way_through_text(name: str) -> None:
    for row in generate_rows(name, size=3, seed=1, settings={}):
        assert score(row["answer"], row["entry"], full_only=True) == 1
        assert score("none", row["entry"]) <= 0.05


def test_answers_that_a_dataset_cannot_parse_score_zero() -> None:
    entry = item("prime_factorization", "2 \u00d7 3")
    # The dataset itself raises: "two" is no integer.
    assert [score(text, entry) for text in ("3 \u00d7 2", "two")] == [1, 0]


def test_an_error_of_the_entry_is_not_a_zero() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        score("2", item("prime_factorization", "two"))
    for entry in ("{", "[]", "{}"):
        with pytest.raises(ValueError, match="entry is no item of reasoning-gym"):
            score("5", entry)
    with pytest.raises(ValueError, match="'chain_sun' not registered"):
        score("5", item("chain_sun", "5"))


def test_hack_a_list_of_guesses_has_partial_credit_unless_refused() -> None:
    entry = item("chain_sum", "5")
    assert [score("1 2 3 4 5", entry, full_only=full) for full in (False, True)] == [1 / 9, 0]


def test_hack_any_answer_has_some_credit_unless_refused() -> None:
    entry = item("sentence_reordering", "a good day")
    assert [score("x", entry, full_only=full) for full in (False, True)] == [0.05, 0]
