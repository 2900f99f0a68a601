"""Accuracy on a split and its comparison."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Prompt
from configs.task import AnswerPlace
from pipeline.data.text.prompts import PromptMaker
from pipeline.evaluate.evaluation import (
    Answer,
    Evaluation,
    compare,
    evaluate,
    judge,
    requests,
)
from rewards.base import Outcome, RewardInput
from tests.samples import CharTokenizer, completion, make_config, make_prompts

PROMPTS = make_prompts(4)
MAKER = PromptMaker(Prompt(), CharTokenizer())


def answered(*texts: str, samples: int = 1, extraction: AnswerPlace = "tags") -> Evaluation:
    """The judged completions of the first prompts; a text that ends in `...` was truncated."""
    prompts = PROMPTS[: len(texts) // samples]
    asked = requests(prompts, phase="test", samples=samples)
    drawn = [
        completion(one, text.removesuffix("..."), ended=not text.endswith("..."))
        for one, text in zip(asked, texts, strict=True)
    ]
    config = make_config(Path(), eval={"extraction": extraction}, **TAGGED)
    return judge(prompts, drawn, config=config, maker=MAKER)


def voted(*answers: str) -> Evaluation:
    """The judged samples of the first prompt, whose right answer is 2; "" has no answer."""
    return answered(*(answer and f"<a>{answer}</a>" for answer in answers), samples=len(answers))


def test_answers_are_judged_against_their_own_prompts():
    judged = answered("<r>x</r><a>2</a>", "<a>4</a>", "<r>x</r><a>5</a>", "<r>x</r><a>8</a>...")
    assert judged.answers == (
        Answer(1, 0, "<r>x</r><a>2</a>", "2", "2", True, True, "eos", 17, prompt="twice 1?"),
        Answer(2, 0, "<a>4</a>", "4", "4", True, False, "eos", 9, prompt="twice 2?"),
        Answer(3, 0, "<r>x</r><a>5</a>", "6", "5", False, True, "eos", 17, prompt="twice 3?"),
        Answer(4, 0, "<r>x</r><a>8</a>", "8", "8", True, False, "length", 16, prompt="twice 4?"),
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


def test_the_answer_is_extracted_as_configured():
    texts = ("<a>3</a> or rather 2", "4 apples", "no idea")
    tagged, numbers = answered(*texts), answered(*texts, extraction="last_number")
    assert [answer.found for answer in tagged.answers] == ["3", None, None]
    assert [answer.correct for answer in numbers.answers] == [True, True, False]
    assert (tagged.summary()["unanswered"], numbers.summary()["unanswered"]) == (2 / 3, 1 / 3)


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


def test_before_and_after_are_compared_in_pairs():
    before = answered("<a>2</a>", "<a>0</a>", "<a>0</a>", "<a>0</a>")
    after = answered("<a>2</a>", "<a>4</a>", "<a>6</a>", "<a>0</a>")
    found = compare(before, after)
    assert (found["before"], found["after"]) == (before.summary(), after.summary())
    assert (found["paired_difference"], found["gained"], found["lost"]) == (0.5, 2, 0)
    # Both changes in one direction: 2 * 0.5 ** 2.
    assert (found["paired_p"], found["paired_test"]) == (0.5, "McNemar, exact")


# --- reward metrics

PARTS = [
    {"name": "length", "function": "a:b", "weight": 2.0},
    {"name": "vowel", "function": "a:c", "weight": 1.0},
    {"name": "correct", "function": "rewards.numeric:numeric_answer", "weight": 0.0},
]


async def outcomes(inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
    """Length and vowels, which do not apply to digits; right if it is long; errors for `!`."""
    error = Outcome.failed("raised", "no")
    return [
        {
            "length": error if text == "!" else Outcome(float(len(text))),
            "vowel": Outcome(None if text.isdigit() else float("a" in text)),
            "correct": error if text == "!" else Outcome(float(len(text) > 3)),
        }
        for text in (one.completion for one in inputs)
    ]


def scored(
    *texts: str, metric: str, samples: int = 1, references: bool = False, **tables: Any
) -> Evaluation:
    """The completions of the first prompts, scored by `outcomes`."""
    config = make_config(
        Path(),
        rewards={"functions": PARTS},
        eval={"metric": metric, "samples": samples, "temperature": 1.0},
        **tables,
    )
    prompts = [
        prompt if references else replace(prompt, answer=None)
        for prompt in PROMPTS[: len(texts) // samples]
    ]
    asked = requests(prompts, phase="test", samples=samples)
    drawn = [completion(one, text) for one, text in zip(asked, texts, strict=True)]
    return asyncio.run(evaluate(prompts, drawn, config=config, maker=MAKER, score=outcomes))


def test_a_reward_part_is_a_metric_without_reference_answers():
    judged = scored("abc", "!", "12345", metric="length")
    first, failed, _ = judged.answers
    assert first == Answer(
        *(1, 0, "abc", None, None, None, False, "eos", 4),
        rewards={"length": 3.0, "vowel": 1.0, "correct": 0.0},
        score=3.0,
        reward=7.0,
        prompt="twice 1?",
    )
    # An answer without a score is excluded, not 0; nothing here is right or wrong.
    assert (failed.score, failed.reward, failed.errors["length"]) == (None, None, "raised: no")
    assert judged.errors == [("length", "raised: no"), ("correct", "raised: no")]
    summary = judged.summary()
    told = {"score": 4.0, "n": 2, "prompts": 3, "excluded": 1 / 3, "reward": 8.5}
    told |= {"reward/length": 4.0, "reward/vowel": 0.5, "reward/correct": 0.5}
    assert summary | told == summary
    assert judged.means == {"score": 4.0, "reward": 8.5}
    assert not {"accuracy", "correct", "pass@2", "unanswered", "format_only"} & summary.keys()
    assert Evaluation.of(json.loads(json.dumps(judged.rows)), metric="length") == judged


def test_right_and_wrong_are_reported_beside_a_score_where_there_are_references():
    judged = scored("<a>2</a>", "<a>1</a>", metric="length", samples=2, references=True, **TAGGED)
    summary = judged.summary()
    assert (summary["correct"], summary["score"], summary["n"]) == (0.5, 8.0, 1)
    assert (summary["pass@2"], summary["majority@2"]) == (1.0, 1.0)


TAGGED: dict[str, Any] = {
    "prompt": {
        "reasoning_open": "<r>",
        "reasoning_close": "</r>",
        "answer_open": "<a>",
        "answer_close": "</a>",
    }
}


def test_scores_are_compared_on_the_prompts_that_have_both():
    before = scored("a", "!", "aaa", "aaaa", metric="length")
    after = scored("aa", "aaaa", "!", "aaaaaa", metric="length")
    found = compare(before, after)
    assert (found["before"]["score"], found["after"]["score"]) == (8 / 3, 4.0)
    # Prompts 1 and 4 rise by 1 and 2: two of four choices of signs are as far from 0.
    assert (found["paired_difference"], found["paired_n"]) == (1.5, 2)
    assert (found["paired_p"], found["gained"], found["lost"]) == (0.5, 2, 0)
    nothing = compare(scored("!", metric="length"), scored("a", metric="length"))
    assert nothing["before"]["score"] is None
    missing = {"paired_difference": None, "paired_ci95": None, "paired_p": None, "paired_n": 0}
    assert nothing | missing == nothing


def test_a_reward_of_right_and_wrong_is_an_accuracy():
    right, wrong = "a text", "a"
    found = scored(right, wrong, "!", right, metric="correct", references=True)
    summary = found.summary()
    assert (summary["accuracy"], summary["n"], summary["prompts"]) == (2 / 3, 3, 4)
    assert (summary["excluded"], summary["reward/correct"]) == (0.25, 2 / 3)
    assert found.means["accuracy"] == 2 / 3
    assert "score" not in summary
    again = json.loads(json.dumps(found.rows))
    assert Evaluation.of(again, metric="correct", of_accuracy=True) == found
    later = scored(right, right, right, "!", metric="correct", references=True)
    change = compare(found, later)
    assert (change["paired_n"], change["gained"], change["lost"]) == (2, 1, 0)
    assert change["paired_test"] == "McNemar, exact"
    nothing = scored("!", metric="correct")
    assert nothing.summary()["accuracy"] is None
    assert compare(nothing, nothing)["paired_difference"] is None
    several = scored(right, wrong, "!", right, metric="correct", samples=2).summary()
    assert (several["n"], several["accuracy"], several["pass@2"]) == (1, 0.5, 1.0)
