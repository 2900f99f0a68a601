"""Rewards for a format, pairs of tags and patterns, and the hacks that their docstrings list."""

from __future__ import annotations

import pytest

from configs.schema import Prompt
from rewards.base import Tags
from rewards.format import Pattern, is_well_formed, tag_pairs

TAGS = Tags.of(Prompt())
GOOD = "<reasoning>1+1=2</reasoning><answer>2</answer>"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (GOOD, True),
        ("\n<reasoning>\n1+1=2\n</reasoning>\n\n<answer> 2 </answer>\n", True),
        ("<reasoning>a < b > c</reasoning><answer>x</answer>", True),
        ("so " + GOOD, False),
        (GOOD + " done", False),
        (GOOD + GOOD, False),
        ("<answer>2</answer><reasoning>1+1=2</reasoning>", False),
        ("<answer>2</answer>", False),
        ("<reasoning>1+1=2</reasoning>", False),
        ("<reasoning>1+1=2<answer>2</answer></reasoning>", False),
        ("<reasoning>1<reasoning>2</reasoning><answer>2</answer>", False),
        ("<reasoning>1</reasoning><answer>2</answer></answer>", False),
        ("<reasoning>1</reasoning>and<answer>2</answer>", False),
        ("<reasoning> </reasoning><answer>2</answer>", False),
        ("<reasoning>1</reasoning><answer>\n</answer>", False),
        ("", False),
    ],
)
def test_one_reasoning_and_one_answer_and_nothing_else(completion: str, expected: bool):
    assert is_well_formed(completion, stop_reason="eos", tags=TAGS) is expected


def test_a_truncated_completion_is_not_well_formed():
    assert not is_well_formed(GOOD, stop_reason="length", tags=TAGS)
    assert is_well_formed(GOOD, stop_reason="stop_string", tags=TAGS)


def test_tags_are_not_regular_expressions():
    tags = Tags("(?:", ")", "[", "]")
    assert is_well_formed("(?: a ) [ b ]", stop_reason="eos", tags=tags)
    assert not is_well_formed("(?: a . [ b ]", stop_reason="eos", tags=tags)


def test_without_tags_an_answer_is_well_formed():
    tags = Tags.of(Prompt(answer="last_line"))
    assert is_well_formed("4", stop_reason="eos", tags=tags)
    assert not is_well_formed("4", stop_reason="length", tags=tags)
    assert not is_well_formed(" \n", stop_reason="eos", tags=tags)
    with pytest.raises(ValueError, match=r'no tags with prompt\.answer = "last_line"'):
        tag_pairs("4", tags=tags)


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
