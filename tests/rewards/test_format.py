"""The reward for the required format."""

from __future__ import annotations

import pytest

from configs.schema import Prompt
from rewards.base import Tags
from rewards.format import is_well_formed, tag_pairs

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
