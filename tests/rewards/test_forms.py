"""Forms of reward functions: recognised by signature, called as their authors expect."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rewards.base import Outcome, RewardInput, Tags
from rewards.forms import Form, recognise

TAGS = Tags("<r>", "</r>", "<a>", "</a>")
ONE = RewardInput("ask?", "says", "eos", "33", {"question": "ask", "level": 2}, TAGS, prompt_id=4)
OTHER = replace(ONE, completion="say", answer="4", row={"question": "and", "level": 5})
CHAT = replace(ONE, messages=({"role": "user", "content": "ask"},))


def outcomes(form: Form, *inputs: RewardInput) -> list[Outcome]:
    scored = list(form.score(inputs))
    assert sorted(index for index, _, _ in scored) == list(range(len(inputs)))
    return [outcome for _, outcome, _ in sorted(scored, key=lambda one: one[0])]


def values(form: Form, *inputs: RewardInput) -> list[float | None]:
    return [outcome.value for outcome in outcomes(form, *inputs)]


def of_columns(completion: str, *, answer: str, level: int, scale: float = 1.0) -> float:
    return scale * (len(completion) + level + float(answer))


def test_a_sample_function_gets_the_columns_that_it_names():
    form = recognise(of_columns, {"scale": 2.0})
    assert (form.kind, form.needs_answer, form.columns) == ("sample", True, ("level",))
    assert values(form, ONE, OTHER) == [2 * (4 + 2 + 33), 2 * (3 + 5 + 4)]


def test_a_sample_function_may_take_all_columns_and_what_else_it_names():
    def everything(completion: str, stop_reason: str, tags: Tags, **columns: Any) -> float:
        assert completion == "says"
        assert (stop_reason, tags) == ("eos", TAGS)
        assert columns == {"answer": "33", "question": "ask", "level": 2}
        return 1.0

    form = recognise(everything, {})
    assert (form.needs_answer, form.columns) == (False, ())
    assert values(form, ONE) == [1.0]

    def not_replaced(completion: str, level: int = 1, **columns: Any) -> float:
        return float("level" not in columns) * level

    assert values(recognise(not_replaced, {"level": 7}), ONE) == [7.0]


def test_a_batch_function_gets_inputs():
    form = recognise(lambda inputs: np.array([len(one.completion) for one in inputs]), {})
    assert form.kind == "batch"
    assert values(form, ONE, OTHER) == [4.0, 3.0]


def test_a_trl_function_gets_lists_by_keyword():
    def trl(
        completions: list[str], level: list[int], *, prompts: list[str], **kwargs: Any
    ) -> list[float]:
        assert prompts == ["ask?", "ask?"]
        assert kwargs == {"question": ["ask", "and"], "answer": ["33", "4"]}
        return [len(text) + number for text, number in zip(completions, level, strict=True)]

    form = recognise(trl, {})
    assert (form.kind, form.columns) == ("trl", ("level",))
    assert values(form, ONE, OTHER) == [6.0, 8.0]


def test_a_trl_function_gets_messages_of_chat_rows():
    def chat(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        assert prompts[0][-1] == {"role": "user", "content": "ask"}
        texts = [completion[0]["content"] for completion in completions]
        return [
            float(text == "says" and found == "33")
            for text, found in zip(texts, answer, strict=True)
        ]

    assert values(recognise(chat, {}), CHAT) == [1.0]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    """A function as in verl's documentation."""
    assert (data_source, extra_info["level"]) == ("", 2)
    return float(solution_str == "says" and ground_truth == "33")


def verl_mapping(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **more: Any
) -> dict[str, Any]:
    assert (data_source, extra_info, more) == ("gsm8k", {"index": 3}, {"strict": True})
    return {"score": 0.5, "acc": True, "pred": ground_truth}


async def verl_async(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, scale: float = 1.0
) -> float:
    return scale * len(solution_str)


def verl_batch(
    data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any
) -> list[Any]:
    assert [info["level"] for info in extra_infos] == [2]
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [{"score": len(text) + float(answer)} for text, answer in pairs]


def openrlhf(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> Any:
    assert (queries, prompts, labels, kwargs) == (["ask?says"], ["ask?"], ["33"], {})
    rewards = np.array([0.5], np.float32)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": np.array([4])}}


@pytest.mark.parametrize(
    ("function", "args", "row", "kind", "value"),
    [
        (verl, {}, {}, "sample", 1.0),
        (
            verl_mapping,
            {"strict": True},
            {"data_source": "gsm8k", "extra_info": {"index": 3}},
            "sample",
            0.5,
        ),
        (verl_async, {"scale": 0.5}, {}, "async", 2.0),
        (verl_batch, {}, {}, "batch", 37.0),
        (openrlhf, {}, {}, "batch", 0.5),
    ],
)
def test_functions_of_verl_and_openrlhf_are_called_as_there(
    function: Any, args: Mapping[str, object], row: Mapping[str, object], kind: str, value: float
):
    form = recognise(function, args)
    one = replace(ONE, row={**ONE.row, **row})
    assert form.kind == kind
    assert form.needs_answer == (kind != "batch")
    assert form.columns == ()
    if kind == "async":
        assert asyncio.run(form.score_one(one, timeout_s=9)) == (Outcome(value), "")
    else:
        assert values(form, one) == [value]


class Within:
    def __init__(self, limit: int, *, share: float = 1.0) -> None:
        if limit < 0:
            raise ValueError("limit is negative")
        self.limit, self.share = limit, share

    def __call__(self, completion: str) -> float:
        return self.share * (len(completion) <= self.limit)


def test_a_class_is_constructed_and_its_method_may_be_async():
    class Judge:
        async def __call__(self, completion: str, *, answer: str) -> float:
            return float(completion == answer)

    form, judge = recognise(Within, {"limit": 3, "share": 0.5}), recognise(Judge, {})
    assert (form.kind, judge.kind) == ("sample", "async")
    assert values(form, ONE, OTHER) == [0.0, 0.5]
    same = replace(ONE, answer="says")
    assert asyncio.run(judge.score_one(same, timeout_s=9)) == (Outcome(1.0), "")


def takes_all(completion: str, *, scale: float = 1.0, **columns: Any) -> None: ...


def test_a_function_cannot_change_what_others_see():
    def changes(completion: str, *, tools: list[str], row: dict[str, Any], messages: Any) -> float:
        tools.append(completion)
        row.clear()
        messages[0]["content"] += "!"
        return float(len(tools) + len(messages[0]["content"]))

    def batch(inputs: Sequence[Any]) -> list[float]:
        return [changes("", **one.row, row={}, messages=one.messages) for one in inputs]

    def trl(completions: list[str], tools: list[list[str]], prompts: list[Any]) -> list[float]:
        return [
            changes("", tools=tools[n], row={}, messages=prompts[n])
            for n in range(len(completions))
        ]

    given = replace(CHAT, row={"tools": ["a"]})
    for function in (changes, batch, trl):
        assert values(recognise(function, {}), given, given) == [6, 6]
    assert given.row == {"tools": ["a"]}
    assert CHAT.messages == ({"role": "user", "content": "ask"},)


def needs_ids(prompts: list[str], completions: list[str], completion_ids: list[int]) -> None: ...


def two_texts(text: str, answer: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (3, {}, "is of type int, not a function or class; write def f(completion, *, answer"),
        (two_texts, {}, "has the parameters text, answer; write def f(comple"),
        (needs_ids, {}, "needs 'completion_ids', which"),
        (of_columns, {"scala": 1}, "has no parameter 'scala' for args.scala; nearest: 'scale'"),
        (takes_all, {"scal": 1}, "has no parameter 'scal' for args.scal; nearest: 'scale'"),
        (of_columns, {"scale": "2"}, "args.scale = '2': Input should be a valid number"),
        (Within, {"limit": -1}, "constructing it with limit = -1 raises ValueError: limit is n"),
        (dict, {}, "objects of the class cannot be called: it has no __call__; write def f("),
    ],
)
def test_what_has_no_form_is_refused_with_the_right_form(
    function: Any, args: Mapping[str, object], message: str
):
    with pytest.raises(ValueError, match=re.escape(message)):
        recognise(function, args)


def test_promise_5_only_the_failing_inputs_of_a_batch_fail():
    def inverse(inputs: Sequence[RewardInput]) -> list[float]:
        return [1 / (len(one.completion) - 3) for one in inputs]

    first, second, third = outcomes(recognise(inverse, {}), ONE, OTHER, ONE)
    assert (first, third) == (Outcome(1.0), Outcome(1.0))
    assert second.error is not None
    assert second.error.cause == "raised"
    assert re.fullmatch(r"raised ZeroDivisionError: .* \(test_forms.py:\d+\)", second.error.message)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "returned a float, not a list of 1 number"),
        ([1.0, 2.0], "returned 2 values for 1 completion"),
        (np.array(["1"]), "returned a str, not a number"),
    ],
)
def test_promise_5_results_of_a_wrong_shape_are_errors(returned: Any, message: str):
    for outcome in outcomes(recognise(lambda _: returned, {}), ONE, OTHER, ONE):
        assert outcome.error is not None
        assert outcome.error.cause == "invalid"
        assert outcome.error.message.startswith(message)


def test_promise_5_endless_recursion_and_base_exceptions_are_errors():
    def deeper(completion: str) -> float:
        return deeper(completion)

    def leaves(completion: str) -> float:
        raise SystemExit(completion)

    for function, message in ((deeper, "raised RecursionError"), (leaves, "raised SystemExit: s")):
        ((_, outcome, trace),) = recognise(function, {}).score([ONE])
        assert outcome.error is not None
        assert outcome.error.message.startswith(message)
        assert f"in {function.__name__}" in trace
