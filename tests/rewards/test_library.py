"""The library of reward functions: cases with the score that a person gives, and properties.

`cases/MODULE.FUNCTION.jsonl` has a completion (or the `text` of its answer) a line, with the
arguments, and the score or the beginning of the error. A `note` names a hack of the docstring.
"""

from __future__ import annotations

import doctest
import json
import math
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from configs.task import AnswerPlace
from rewards import choice, format, numeric, repetition  # noqa: A004
from rewards.base import RewardInput, Tags
from rewards.forms import recognise
from rewards.json_schema import JsonSchema
from rewards.latex import latex_answer
from rewards.length import overlong_punishment
from rewards.quantities import parse_quantity
from rewards.resolve import resolve

TAGS = Tags.of(Prompt())
CASES = sorted((Path(__file__).parent / "cases").glob("*.jsonl"))
MODULES = [
    *("answers", "choice", "format", "json_schema", "latex", "length"),
    *("numeric", "quantities", "repetition", "units"),
]

Score = Callable[[str], float | Mapping[str, float]]


def scored(function: str, case: dict[str, Any]) -> float | dict[str, float] | str:
    """The score of a case by the function as a run calls it, or its error."""
    try:
        form = recognise(resolve(function), case.get("args", {}))
    except ValueError as error:
        return str(error)
    one = RewardInput(
        prompt="",
        completion=case.get("completion", f"<answer>{case.get('text')}</answer>"),
        stop_reason=case.get("stop_reason", "eos"),
        answer=case.get("answer"),
        row=case.get("row", {}),
        tags=Tags.of(Prompt(answer=case.get("place", "tags"))),
    )
    ((_, outcome, _),) = form.score([one])
    if outcome.error is not None:
        return outcome.error.message
    assert outcome.value is not None
    return dict(outcome.named) or outcome.value


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_completions_have_the_score_that_a_person_gives(file: Path) -> None:
    cases = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    wrong = []
    for case in cases:
        found = scored(f"rewards.{file.stem.replace('.', ':')}", case)
        error = case.get("error")
        is_right = found == pytest.approx(case["score"]) if error is None else error in str(found)
        wrong += [] if is_right else [(case, found)]
    assert wrong == []


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_are_true(name: str) -> None:
    module = import_module(f"rewards.{name}")
    names = {"tags": TAGS, "json": json, "partial": partial}
    found = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS, report=True)
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


PIECES = (
    "<answer>", "</answer>", "<reasoning>", "</reasoning>", "\\boxed{", "}", "{", "$", "\\frac{1}",
    "1", "-", "1,234", "1e5", "/", "%", " x 10^", "answer is ", "Answer: ", "(B)", "B", "A ", "\n",
    '{"a": 1}', "```json\n", "```", " ", ".", "km", "٣", "²", "\ud800", "\x00",
)  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))


SCORES: dict[str, tuple[Score, float, float]] = {
    "tag_pairs": (partial(format.tag_pairs, tags=TAGS), 0, 1),
    "json": (partial(JsonSchema({"type": "object"}), tags=TAGS), 0, 1),
    "repetition": (partial(repetition.ngram_repetition, unit="characters", n=2), -1, 0),
    "pattern": (format.Pattern("[a-z]", match="count", maximum=3), 0, 1),
    "choice": (partial(choice.choice_letter, answer="B", tags=TAGS, extraction="completion"), 0, 1),
    **{
        place: (partial(numeric.numeric_answer, answer="5", tags=TAGS, extraction=place), 0, 1)
        for place in get_args(AnswerPlace)
    },
}
"""Scorers with the least and the greatest score."""


@pytest.mark.parametrize("name", SCORES)
@given(text=TEXTS)
def test_any_text_has_a_finite_score_in_the_range(name: str, text: str) -> None:
    score, least, greatest = SCORES[name]
    value = score(text)
    total = sum(value.values()) if isinstance(value, Mapping) else value
    assert math.isfinite(total)
    assert least <= total <= greatest


@given(st.integers(-(10**15), 10**15), st.floats(allow_nan=False, allow_infinity=False))
def test_notations_do_not_change_a_number(number: int, real: float) -> None:
    texts = (f"{number:,}", f"{number}.00", f"{number:_}", f"{number} apples")
    assert {getattr(parse_quantity(text), "value", None) for text in texts} == {number}
    found = parse_quantity(repr(real))
    assert found is not None
    assert found.value == Fraction(repr(real))


def test_mathematics_is_compared_in_any_thread_or_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score = partial(latex_answer, r"<answer>\frac12</answer>", answer="0.5", tags=TAGS)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score).result() == 1
    monkeypatch.delitem(sys.modules, "rewards.latex")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match="make install-rewards") as missing:
        import_module("rewards.latex")
    assert missing.value.name == "math_verify"


def test_schemas_in_files_and_json_that_is_too_deep_or_too_long(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('{"minItems": 1}')
    score = partial(JsonSchema(str(path)), tags=TAGS)
    assert [score(text) for text in ("[1]", "[]", "[" * 100_000, "9" * 5000)] == [1, 0, 0, 0]
    path.write_text("{")
    for name, what in (("list", "JSONDecodeError: "), ("gone", "FileNotFoundError: ")):
        with pytest.raises(ValueError, match=rf"schema = .*{name}\.json\" raises {what}"):
            recognise(JsonSchema, {"schema": str(tmp_path / f"{name}.json")})
    unknown = JsonSchema({"$ref": "http://127.0.0.1:9/schema.json"})  # nothing is downloaded
    with pytest.raises(Exception, match=r"schema\.json"):
        unknown("{}", tags=TAGS)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1)]
)
def test_the_overlong_penalty_falls_over_the_last_tokens(length: int, expected: float) -> None:
    assert overlong_punishment(length, budget=100, tokens=20) == pytest.approx(expected)
