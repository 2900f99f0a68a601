"""Accuracy on a split and its comparison."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.datatypes import RolloutName, RolloutRequest
from pipeline.evaluation import Answer, Evaluation, compare, judge, requests
from pipeline.significance import compare_paired
from rewards.base import Tags
from tests.fakes import CharTokenizer, completion, make_prompts

TAGS = Tags("<r>", "</r>", "<a>", "</a>")
PROMPTS = make_prompts(4)


def answered(*texts: str) -> Evaluation:
    """The judged completions of the first prompts; a text that ends in `...` was cut off."""
    asked = requests(PROMPTS[: len(texts)], phase="test")
    drawn = [
        completion(one, text.removesuffix("..."), ended=not text.endswith("..."))
        for one, text in zip(asked, texts, strict=True)
    ]
    return judge(PROMPTS[: len(texts)], drawn, tokenizer=CharTokenizer(), tags=TAGS)


def test_a_request_is_named_by_split_and_prompt_alone():
    asked = requests(PROMPTS[:2], phase="validation")
    assert [one.name for one in asked] == [
        RolloutName("validation", 0, 1, 0),
        RolloutName("validation", 0, 2, 0),
    ]
    assert [one.prompt_tokens.tolist() for one in asked] == [[2, 51], [2, 52]]


def test_answers_are_judged_against_their_own_prompts():
    judged = answered("<r>x</r><a>2</a>", "<a>4</a>", "<r>x</r><a>5</a>", "<r>x</r><a>8</a>...")
    assert judged.answers == (
        Answer(1, "<r>x</r><a>2</a>", "2", correct=True, well_formed=True, num_tokens=17),
        Answer(2, "<a>4</a>", "4", correct=True, well_formed=False, num_tokens=9),
        Answer(3, "<r>x</r><a>5</a>", "6", correct=False, well_formed=True, num_tokens=17),
        Answer(4, "<r>x</r><a>8</a>", "8", correct=True, well_formed=False, num_tokens=16),
    )
    assert judged.summary() == {
        "accuracy": 0.75,
        "n": 4,
        "ci95": judged.accuracy.ci95,
        "well_formed": 0.5,
        "accuracy_among_well_formed": 0.5,
        "num_tokens_mean": 14.75,
    }


def test_without_a_well_formed_answer_there_is_no_accuracy_among_them():
    assert answered("2", "4").summary()["accuracy_among_well_formed"] is None


def test_completions_of_other_prompts_are_refused():
    name = RolloutRequest(RolloutName("test", 0, 1, 0), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="zip"):
        judge(PROMPTS, [completion(name)], tokenizer=CharTokenizer(), tags=TAGS)


def test_an_evaluation_survives_its_file():
    judged = answered("<r>x</r><a>2</a>", "\u2028\x85\n")
    assert Evaluation.of(json.loads(json.dumps(judged.rows))) == judged


def test_before_and_after_are_compared_in_pairs():
    before = answered("<a>2</a>", "<a>0</a>", "<a>0</a>", "<a>0</a>")
    after = answered("<a>2</a>", "<a>4</a>", "<a>6</a>", "<a>0</a>")
    change = compare_paired(before.correct, after.correct)
    assert compare(before, after) == {
        "before": before.summary(),
        "after": after.summary(),
        "paired_difference": 0.5,
        "paired_ci95": list(change.ci95),
        "paired_p": 0.5,  # both changes in one direction: 2 * 0.5 ** 2
    }
