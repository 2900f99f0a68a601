"""Notices about reference answers that no right answer of a model equals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from configs.schema import Config
from pipeline.data.references import reference_notices
from pipeline.data.splits import LoadedData, LoadedSplit
from pipeline.types import Prompt
from tests.samples import make_config

EXACT, NUMERIC = "rewards.correctness:exact_answer", "rewards.numeric:numeric_answer"
MARKED = "answer_pattern = '#### (.+)'"
BOXED = r"answer_pattern = '\\boxed\{(.+)\}'"
STATED = "answer_pattern = 'answer is:? (.+)'"


def split(*answers: str | None) -> LoadedSplit:
    tokens = np.zeros(1, np.int32)
    prompts = [
        Prompt(id=n, text=f"{n}", tokens=tokens, answer=answer, row={})
        for n, answer in enumerate(answers)
    ]
    return LoadedSplit(tuple(prompts), (), (), 0)


def config(function: str = EXACT) -> Config:
    return make_config(Path(), rewards={"functions": [{"name": "correct", "function": function}]})


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ("3*4=<<3*4=12>>12\n#### 12", MARKED),
        ("#### 1,200\n", MARKED),
        (r"So $x = 3$ and the sum is $\boxed{\frac{1}{2}}$.", BOXED),
        ("They have 3 + 4. The answer is: 7", STATED),
        ("It follows that\nthe final answer is 7.", STATED),
        ("1e-05", "rewards.numeric:numeric_answer"),
        ("0.10000000149011612", "round them"),
        ("0.30000000000000004", "round them"),
        ("9.999999747378752e-06", "round them"),
        ("1234.56005859375", "round them"),
        ("-0.1000000014901161200", "round them"),
        *((text, None) for text in ("12", "0.5", "3.141592653589793", "0.3333333333333333")),
        *((text, None) for text in ("Paris", "$\\boxed{5}$", "# heading", "10000000000000000")),
        *((text, None) for text in ("100000000000.5", "a\n#### b\nc", None)),
        # Decimals with a fixed scale.
        *((text, None) for text in ("18.00000000", "-2.50000000", "18000000.50000000")),
        *((text, None) for text in ("0.00000000", "0.00000001", "0.00001200", "0.000000001200")),
    ],
)
def test_what_is_noticed(answer: str | None, advice: str | None) -> None:
    found = list(reference_notices(config(), LoadedData(split(answer), None, split("12"))))
    assert any(advice in notice.advice for notice in found) if advice else found == []


def test_a_notice_names_the_setting_and_an_example() -> None:
    data = LoadedData(split("12"), None, split("7", "a\n#### 8", None), {"own": split("#### 9")})
    first, second = reference_notices(config(), data)
    assert first.what.startswith("data.test: 1 of 2 reference answers are solutions that end in")
    assert first.what.endswith(r"as 'a\n#### 8'")
    assert second.what.startswith("eval.sets (own): 1 of 1 ")


@pytest.mark.parametrize(
    ("answers", "pattern", "refused"),
    [
        (("a\n####3", "b\n####4"), r"'####\s*(.+)'", None),
        (("a\n####3", "b\n#### 4"), r"'####\s*(.+)'", None),
        (("a\n#### 3", "b\n#### 4"), "'#### (.+)'", None),
        (("a\n#### 3", "4", "5"), "'#### (.+)'", "it refuses 2 of 3 rows"),
        (("a\n####3", "4"), r"'####\s*(.+)'", "it refuses 1 of 2 rows"),
        ((r"so \boxed{3}", r"\boxed{4}", "5"), r"'\\boxed\{(.+)\}'", "it refuses 1 of 3 rows"),
    ],
)
def test_the_pattern_matches_the_rows_that_are_found(
    answers: tuple[str, ...], pattern: str, refused: str | None
) -> None:
    (found,) = reference_notices(config(), LoadedData(split(*answers), None, split("12")))
    assert f"answer_pattern = {pattern} in" in found.advice
    assert ("refuses" in found.advice) == (refused is not None)
    assert (refused or "") in found.advice


def test_a_template_with_the_answer_is_noticed() -> None:
    prompt = {"template": r"{question} Write \boxed{answer}."}
    data = LoadedData(split("12"), None, split("7"))
    (notice,) = reference_notices(make_config(Path(), prompt=prompt), data)
    assert notice.what == "prompt.template shows the model the reference answer, {answer}"
    assert notice.advice.endswith("for braces in the text write {{answer}}")


def test_rewards_that_read_numbers_read_exponents() -> None:
    data = LoadedData(split("1e-05"), None, split("1"))
    assert len(list(reference_notices(config(EXACT), data))) == 1
    assert list(reference_notices(config(NUMERIC), data)) == []
