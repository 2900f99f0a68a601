"""The library of reward functions: the examples of their docstrings, and properties of all."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from rewards import choice, format, length, numeric, repetition  # noqa: A004
from rewards.answers import boxed_answer, find_answer, stated_answer
from rewards.base import RewardInput, Tags
from rewards.forms import recognise
from rewards.gym import score_answer
from rewards.json_schema import JsonSchema

TAGS = Tags.of(Prompt())
MODULES = [
    "answers",
    "choice",
    "format",
    "gym",
    "json_schema",
    "latex",
    "length",
    "libraries",
    "numeric",
    "quantities",
    "repetition",
    "units",
]
ITEM = {"question": "2 + 3 =", "answer": "5", "metadata": {"source_dataset": "chain_sum"}}

Score = Callable[[str], float | Mapping[str, float]]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_are_true(name: str) -> None:
    module = import_module(f"rewards.{name}")
    names = {"tags": TAGS, "json": json, "partial": partial}
    flags = doctest.ELLIPSIS
    found = doctest.testmod(module, extraglobs=names, optionflags=flags, report=True)
    assert found.failed == 0
    assert found.attempted > 0


def test_the_first_example_of_the_documentation_tells_answers_apart() -> None:
    text = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    module: dict[str, Any] = {}
    exec(code, module)
    form = recognise(module["closeness"], {"scale": 2.0})
    texts = ("<answer>33</answer>", "<answer>34</answer>", "<answer>9</answer>", "33", "")
    given = [RewardInput("", one, "eos", "33", {}, TAGS) for one in texts]
    assert [outcome.value for _, outcome, _ in form.score(given)] == [1.0, 0.5, 0.0, 0.0, 0.0]


def scores() -> dict[str, tuple[Score, float, float]]:
    """A scorer of each kind with its least and its greatest score."""
    of_five: dict[str, Any] = {"answer": "5", "tags": TAGS}
    found: dict[str, tuple[Score, float, float]] = {
        "tag_pairs": (partial(format.tag_pairs, tags=TAGS), 0, 1),
        "json": (partial(JsonSchema({"type": "object"}), tags=TAGS), 0, 1),
        "length_range": (partial(length.length_range, minimum=2, maximum=4, margin=2), 0, 1),
        "cosine_length": (
            partial(length.cosine_length, **of_five, stop_reason="eos", maximum=9),
            -1,
            1,
        ),
        "words": (repetition.ngram_repetition, -1, 0),
        "characters": (partial(repetition.ngram_repetition, unit="characters", n=2), -1, 0),
        "lines": (repetition.line_repetition, -1, 0),
        "gym": (partial(score_answer, entry=json.dumps(ITEM), tags=TAGS), 0, 1),
    }
    for where in ("tags", "boxed", "stated", "last_number", "completion"):
        found[f"numeric {where}"] = (
            partial(numeric.numeric_answer, **of_five, extraction=where),
            0,
            1,
        )
    for how in ("search", "full", "count"):
        found[f"pattern {how}"] = (format.Pattern("[a-z]", match=how, maximum=3), 0, 1)
    found["choice"] = (
        partial(choice.choice_letter, answer="B", tags=TAGS, extraction="completion"),
        0,
        1,
    )
    return found


PIECES = (
    "<answer>", "</answer>", "<reasoning>", "</reasoning>", "\\boxed{", "}", "{", "$", "\\frac{1}",
    "1", "-", "1,234", "1e5", "/", "%", " x 10^", "answer is ", "Answer: ", "(B)", "B", "A ", "\n",
    '{"a": 1}', "```json\n", "```", " ", ".", "km", "٣", "²", "\ud800", "\x00",
)  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))


SCORES = scores()


@pytest.mark.parametrize("name", SCORES)
@given(text=TEXTS)
def test_any_text_has_a_finite_score_in_the_range(name: str, text: str) -> None:
    score, least, greatest = SCORES[name]
    value = score(text)
    total = sum(value.values()) if isinstance(value, Mapping) else value
    assert math.isfinite(total)
    assert least <= total <= greatest


@given(text=TEXTS)
def test_answers_that_are_found_are_parts_of_the_text(text: str) -> None:
    for found in (boxed_answer(text), stated_answer(text)):
        assert found is None or found in text


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{a}{\{b}}", r"\frac{a}{\{b}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\fbox{1}", None),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_is_the_answer(text: str, boxed: str | None) -> None:
    assert boxed_answer(text) == boxed


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("The answer is 12 km. Really.", "12 km"),
        ("Answer: 3.5", "3.5"),
        ("answer: 1\nthe final answer is: **2**", "2"),
        ("**Answer:**\n\n`42`\nDone", "42"),
        ("the answers are 3", None),
        ("no", None),
    ],
)
def test_the_last_stated_answer_counts(text: str, stated: str | None) -> None:
    assert stated_answer(text) == stated


def test_an_unknown_extraction_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="nearest: 'boxed'"):
        find_answer("1", tags=TAGS, extraction="box")  # type: ignore[arg-type]
