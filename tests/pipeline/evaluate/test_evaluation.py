"""Accuracy on a split and its comparison."""

from __future__ import annotations

import json

import numpy as np
import pytest

from configs.schema import Prompt
from pipeline.contracts.rollouts import RolloutName, RolloutRequest
from pipeline.evaluate.evaluation import (
    Answer,
    Evaluation,
    compare,
    judge,
    requests,
    sample_counts,
)
from pipeline.evaluate.significance import compare_paired
from pipeline.inputs.text.prompts import PromptMaker
from rewards.answers import Extraction
from rewards.base import Tags
from tests.fakes import CharTokenizer, completion, make_prompts

TAGS = Tags("<r>", "</r>", "<a>", "</a>")
PROMPTS = make_prompts(4)
MAKER = PromptMaker(Prompt(), CharTokenizer())


def answered(*texts: str, samples: int = 1, extraction: Extraction = "tags") -> Evaluation:
    """The judged completions of the first prompts; a text that ends in `...` was truncated."""
    prompts = PROMPTS[: len(texts) // samples]
    asked = requests(prompts, phase="test", samples=samples)
    drawn = [
        completion(one, text.removesuffix("..."), ended=not text.endswith("..."))
        for one, text in zip(asked, texts, strict=True)
    ]
    return judge(prompts, drawn, maker=MAKER, tags=TAGS, extraction=extraction)


def voted(*answers: str) -> Evaluation:
    """The judged samples of the first prompt, whose right answer is 2; "" has no answer."""
    return answered(*(answer and f"<a>{answer}</a>" for answer in answers), samples=len(answers))


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
        Answer(1, 0, "<r>x</r><a>2</a>", "2", "2", True, True, "eos", 17),
        Answer(2, 0, "<a>4</a>", "4", "4", True, False, "eos", 9),
        Answer(3, 0, "<r>x</r><a>5</a>", "6", "5", False, True, "eos", 17),
        Answer(4, 0, "<r>x</r><a>8</a>", "8", "8", True, False, "length", 16),
    )
    assert judged.summary() == {
        "metric": "exact_answer",
        "accuracy": 0.75,
        "n": 4,
        "ci95": judged.accuracy.ci95,
        "samples": 1,
        "well_formed": 0.5,
        "accuracy_among_well_formed": 0.5,
        "format_only": 0.25,
        "unanswered": 0.0,
        "truncated": 0.25,
        "num_tokens_mean": 14.75,
    }


def test_accuracy_among_well_formed_is_none_without_well_formed_answers():
    assert answered("2", "4").summary()["accuracy_among_well_formed"] is None


def test_completions_of_other_prompts_are_refused():
    name = RolloutRequest(RolloutName("test", 0, 1, 0), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="1 completions are not those of 4 prompts"):
        judge(PROMPTS, [completion(name)], maker=MAKER, tags=TAGS)


def test_samples_are_requested_prompt_by_prompt():
    asked = requests(PROMPTS[:2], phase="more", samples=2)
    assert [one.name for one in asked] == [
        RolloutName("more", 0, 1, 0),
        RolloutName("more", 0, 1, 1),
        RolloutName("more", 0, 2, 0),
        RolloutName("more", 0, 2, 1),
    ]


def test_samples_out_of_order_are_refused():
    asked = requests(PROMPTS[:2], phase="test", samples=2)
    drawn = [completion(asked[at]) for at in (0, 2, 1, 3)]
    with pytest.raises(ValueError, match="4 completions are not those of 2 prompts"):
        judge(PROMPTS[:2], drawn, maker=MAKER, tags=TAGS)


def test_the_answer_is_extracted_as_configured():
    texts = ("<a>3</a> or rather 2", "4 apples", "no idea")
    tagged, numbers = answered(*texts), answered(*texts, extraction="last_number")
    assert [answer.found for answer in tagged.answers] == ["3", None, None]
    assert [answer.correct for answer in tagged.answers] == [False, False, False]
    assert [answer.found for answer in numbers.answers] == ["2", "4", None]
    assert [answer.correct for answer in numbers.answers] == [True, True, False]
    assert (tagged.summary()["unanswered"], numbers.summary()["unanswered"]) == (2 / 3, 1 / 3)


def test_an_answer_is_judged_with_the_prefix_but_its_tokens_are_not_counted():
    maker = PromptMaker(Prompt(answer_prefix="<r>"), CharTokenizer())
    (asked,) = requests(PROMPTS[:1], phase="test")
    drawn = completion(asked, "x</r><a>2</a>")
    (answer,) = judge(PROMPTS[:1], [drawn], maker=maker, tags=TAGS).answers
    assert answer == Answer(1, 0, "<r>x</r><a>2</a>", "2", "2", True, True, "eos", 14)
    (answer,) = judge(PROMPTS[:1], [drawn], maker=MAKER, tags=TAGS).answers
    assert not answer.well_formed


def test_summary_of_several_samples_per_prompt():
    judged = answered("<a>2</a>", "<a>0</a>", "<a>4</a>", "<a>4</a>", samples=2)
    assert judged.correct.tolist() == [[True, False], [True, True]]
    summary = judged.summary()
    assert (summary["accuracy"], summary["n"], summary["samples"]) == (0.75, 2, 2)
    assert (summary["pass@1"], summary["pass@2"]) == (0.75, 1.0)
    assert (summary["majority@1"], summary["majority@2"]) == (0.75, 1.0)


@pytest.mark.parametrize(
    ("answers", "wins"),
    [
        (("1", "2", "2.0"), True),  # 2 and 2.0 are equivalent
        (("1", "2", "1"), False),
        (("2", "1"), True),  # the first answer wins a tie
        (("1", "2"), False),
        (("", "", "2"), True),  # samples without an answer do not vote
        (("", ""), False),
    ],
)
def test_majority_votes(answers: tuple[str, ...], wins: bool):
    assert voted(*answers).majority_at(len(answers)) == float(wins)


def test_samples_are_split_into_groups_of_k_voters():
    judged = voted("2", "2", "1", "1", "2", "1", "2")
    assert judged.majority_at(1) == 4 / 7
    assert judged.majority_at(3) == 0.5  # 2 2 1 and 1 2 1; the seventh is left over
    assert judged.majority_at(7) == 1.0


def test_sample_counts_are_powers_of_two_and_the_total():
    assert [sample_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_an_evaluation_round_trips_through_its_rows():
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
        "paired_test": "McNemar, exact",
        "gained": 2,
        "lost": 0,
    }
