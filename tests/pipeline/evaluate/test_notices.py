from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluate.evaluation import Answer, Evaluation
from pipeline.evaluate.notices import data_notices, evaluation_notice, untrained_export
from tests.samples import make_config, make_prompts

PROMPTS = make_prompts(3)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({}, True),
        ({"answer": "boxed"}, True),
        ({"answer": "first_line"}, False),
        ({"answer_prefix": "<answer>"}, False),
    ],
)
def test_a_form_that_no_prompt_asks_for_is_told(prompt: dict[str, str], told: bool):
    found = list(data_notices(make_config(Path(), prompt=prompt), PROMPTS))
    assert [line.startswith("answers are ") for line in found] == [True] * told


@pytest.mark.parametrize(
    ("prompt", "stops", "told"),
    [
        ({"answer": "first_line", "turn": "plain"}, ["<eos>"], True),
        ({"answer": "first_line", "turn": "plain"}, ["<eos>", "\n"], False),
        ({"answer": "first_line"}, ["<eos>"], False),
    ],
)
def test_a_first_line_that_nothing_ends_is_told(
    prompt: dict[str, str], stops: list[str], told: bool
):
    config = make_config(Path(), prompt=prompt, rollout={"stop_tokens": stops})
    assert ["the first line" in line for line in data_notices(config, PROMPTS)] == [True] * told


@pytest.mark.parametrize("text", ["<answer>3</answer>", "write <ANSWER>"])
def test_a_prompt_that_asks_for_the_form_or_a_trained_adapter_is_enough(text: str):
    asking = [*PROMPTS, replace(PROMPTS[0], text=text)]
    assert list(data_notices(make_config(Path()), asking)) == []
    started = make_config(Path(), lora={"start": "/somewhere"})
    assert list(data_notices(started, PROMPTS)) == []


@pytest.mark.parametrize(
    ("place", "answer", "reachable"),
    [
        ("first_line", "two\nlines", False),
        ("last_line", "so 3\n#### 3", False),
        ("completion", "two\nlines", True),
        ("last_number", "Paris", False),
        ("last_number", "1,200", True),
        ("boxed", "x{", False),
    ],
)
def test_references_that_cannot_be_given_are_counted(place: str, answer: str, reachable: bool):
    config = make_config(Path(), prompt={"answer": place}, run={"phases": ("grpo",)})
    prompts = [replace(PROMPTS[0], answer=answer, text="the answer, boxed"), PROMPTS[1]]
    found = list(data_notices(config, prompts))
    if reachable:
        assert found == []
    else:
        (line,) = found
        assert line.startswith("1 of 2 reference answers cannot be given")


def evaluation(*found: str | None, count: int = 8, **changes: Any) -> Evaluation:
    """Answers to prompts whose reference is 7."""
    answers = [
        Answer(
            n, 0, "text", "7", one, one == "7", well_formed=False, stop_reason="eos", num_tokens=2
        )
        for n in range(count)
        for one in found
    ]
    return Evaluation(tuple(replace(one, **changes) for one in answers))


def test_why_all_answers_may_be_wrong():
    config = make_config(Path())
    missing = evaluation_notice(evaluation(None), config)
    assert missing is not None
    assert missing.startswith(
        "the accuracy is 0% on 8 prompts: 0 of 8 completions have an answer (the last answer "
        "block), 0 are truncated. The model does not write answers in this form: ask for it"
    )
    assert "rollout.max_new_tokens" not in missing
    cut = evaluation_notice(evaluation(None, stop_reason="length"), config)
    assert cut is not None
    assert cut.endswith("; raise rollout.max_new_tokens")
    other = evaluation_notice(evaluation("7 kg"), config)
    assert other is not None
    assert "e.g. '7 kg' where the reference is '7'" in other
    assert "100%" in (evaluation_notice(evaluation("7"), config) or "")


def test_why_an_export_is_untrained():
    config = make_config(Path())

    def told(*accuracies: float, step: int = 20, **tables: Any) -> str | None:
        entries = [{"step": 5 * n, "accuracy": one} for n, one in enumerate(accuracies)]
        chosen = make_config(Path(), **tables) if tables else config
        return untrained_export(chosen, step=step, validations=entries)

    assert told(0.5, step=0) is None
    late: dict[str, Any] = {
        "eval": {"every_steps": 5},
        "data": {"validation": {"path": "validation.jsonl"}},
    }
    assert told(0.5, **late) == (
        "no trained version could be validated in time; the export is the untrained model"
    )
    assert told() == (
        "no trained version could be exported in time; the export is the untrained model"
    )
    assert "learner.lr" in (told(0.5, 0.4) or "")
    assert "the initial model" in (told(0.5, 0.4, lora={"start": "/somewhere"}) or "")
