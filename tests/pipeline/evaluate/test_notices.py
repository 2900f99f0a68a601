from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluate.evaluation import Answer, Evaluation
from pipeline.evaluate.notices import data_notices, evaluation_notice
from tests.samples import make_config, make_prompts

PROMPTS = make_prompts(3)


FIRST_LINE = {"answer": "first_line", "turn": "plain"}


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({}, ["answers are the last answer block, but no training prompt contains"]),
        ({"prompt": {"answer": "boxed"}}, ["answers are the last \\boxed{...}, but"]),
        ({"prompt": {"answer": "first_line"}}, []),
        ({"prompt": {"answer_prefix": "<answer>"}}, []),
        ({"lora": {"start": "/somewhere"}}, []),
        ({"prompt": FIRST_LINE}, ["answers are the first line, and without turns nothing ends"]),
        ({"prompt": FIRST_LINE, "rollout": {"stop_tokens": ["<eos>", "\n"]}}, []),
    ],
)
def test_a_form_that_no_prompt_asks_for_or_that_nothing_ends_is_told(
    tables: dict[str, Any], told: list[str]
):
    found = list(data_notices(make_config(Path(), **tables), PROMPTS))
    assert len(found) == len(told)
    assert all(line.startswith(begin) for line, begin in zip(found, told, strict=True))
    asking = [*PROMPTS, replace(PROMPTS[0], text="write <ANSWER>")]
    assert list(data_notices(make_config(Path()), asking)) == []


@pytest.mark.parametrize(
    ("place", "answer", "told"),
    [
        ("first_line", "two\nlines", ["1 of 2 reference answers cannot be given"]),
        ("completion", "two\nlines", []),
        ("last_number", "Paris", ["1 of 2 reference answers cannot be given"]),
        ("last_number", "1,200", []),
    ],
)
def test_references_that_cannot_be_given_are_counted(place: str, answer: str, told: list[str]):
    config = make_config(Path(), prompt={"answer": place})
    prompts = [replace(PROMPTS[0], answer=answer), PROMPTS[1]]
    found = data_notices(config, prompts)
    assert [line.partition(":")[0] for line in found] == told


def evaluation(*found: str | None) -> Evaluation:
    """Answers to eight prompts whose reference is 7."""
    samples = [
        Answer(prompt, number, "text", "7", one, one == "7", False, "eos", num_tokens=2)
        for prompt in range(8)
        for number, one in enumerate(found)
    ]
    return Evaluation(tuple(samples))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "0 of 8 completions have an answer (the last answer block), 0 are truncated"),
        ("7 kg", "e.g. '7 kg' where the reference is '7'"),
        ("7", "the accuracy is 100% on 8 prompts"),
    ],
)
def test_why_all_answers_may_be_wrong_or_right(found: str | None, told: str):
    assert told in (evaluation_notice(evaluation(found), make_config(Path())) or "")
    assert evaluation_notice(evaluation(found, "8", "7"), make_config(Path())) is None
