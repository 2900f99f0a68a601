"""Pairs of tags and regular expressions, and the hacks that their docstrings list."""

from __future__ import annotations

import pytest

from configs.schema import Prompt
from rewards.base import Tags
from rewards.format import Pattern, tag_pairs

TAGS = Tags.of(Prompt())


@pytest.mark.parametrize(
    ("completion", "reasoning", "answer"),
    [
        ("<reasoning>a</reasoning><answer>b</answer>", 0.5, 0.5),
        ("x <reasoning>a</reasoning> y <answer>b</answer> z", 0.5, 0.5),
        ("<reasoning>a</reasoning> b", 0.5, 0),
        ("<answer>b</answer>", 0, 0.5),
        ("<answer>b</answer><reasoning>a</reasoning>", 0.5, 0),
        ("<reasoning>a<answer>b</answer></reasoning>", 0.5, 0),
        ("<reasoning>a</reasoning><answer>b", 0.5, 0),
        ("</answer>b<answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_each_pair_of_tags_counts(completion: str, reasoning: float, answer: float) -> None:
    assert tag_pairs(completion, tags=TAGS) == {"reasoning": reasoning, "answer": answer}


@pytest.mark.parametrize(
    "completion",
    [
        "<reasoning> </reasoning><answer></answer>",
        "<reasoning>a</reasoning><answer>b</answer>" * 2,
        "<reasoning><reasoning>a</reasoning><answer>b</answer></answer>",
    ],
)
def test_hack_empty_and_repeated_tags_score_zero(completion: str) -> None:
    assert sum(tag_pairs(completion, tags=TAGS).values()) == 0


def test_hack_nonsense_between_the_tags_scores_one() -> None:
    assert sum(tag_pairs("<reasoning>x</reasoning><answer>x</answer>", tags=TAGS).values()) == 1


def test_a_pattern_matches_somewhere_everything_or_often() -> None:
    text = "Step 1: a\nStep 2: b\nStep 3: c"
    assert [Pattern("Step 2")(text), Pattern("Stop")(text)] == [1, 0]
    assert [Pattern("Step.*", match="full")(t) for t in (text, "Step 1")] == [0, 1]
    steps = [Pattern(r"(?m)^Step", match="count", maximum=n)(text) for n in (2, 3, 4)]
    assert steps == [1, 1, 0.75]


def test_hack_the_shortest_match_and_empty_steps_score_one() -> None:
    assert Pattern(r"\d+ apples")("3 apples") == 1
    assert Pattern(r"Step \d", match="count", maximum=2)("Step 1 Step 1 Step 1") == 1


def test_invalid_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        Pattern("(")
    with pytest.raises(ValueError, match="match = 'all'"):
        Pattern("a", match="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="maximum = 0"):
        Pattern("a", maximum=0)
