"""Notices about reference answers that no right answer of a model equals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.references import reference_notices
from pipeline.data.splits import LoadedData, LoadedSplit
from pipeline.types import Prompt
from tests.samples import make_config

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


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ("3*4=<<3*4=12>>12\n#### 12", MARKED),
        ("#### 1,200\n", MARKED),
        ("a\n####3", r"answer_pattern = '####\s*(.+)'"),
        (r"So $x = 3$ and the sum is $\boxed{\frac{1}{2}}$.", BOXED),
        ("They have 3 + 4. The answer is: 7", STATED),
        ("It follows that\nthe final answer is 7.", STATED),
        *((text, None) for text in ("12", "0.5", "3.141592653589793", "1e-05")),
        *((text, None) for text in ("Paris", "$\\boxed{5}$", "# heading", "10000000000000000")),
        *((text, None) for text in ("a\n#### b\nc", "##### 3", None)),
    ],
)
def test_what_is_noticed(answer: str | None, advice: str | None) -> None:
    found = list(
        reference_notices(make_config(Path()), LoadedData(split(answer), None, split("12")))
    )
    assert any(advice in notice.advice for notice in found) if advice else found == []


def test_a_template_with_the_answer_is_noticed() -> None:
    prompt = {"template": r"{question} Write \boxed{answer}."}
    data = LoadedData(split("12"), None, split("7"))
    (notice,) = reference_notices(make_config(Path(), prompt=prompt), data)
    assert notice.what == "prompt.template shows the model the reference answer, {answer}"
    assert notice.advice.endswith("for braces in the text write {{answer}}")
