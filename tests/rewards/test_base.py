"""The reward contract: an error is not a zero, and only failing inputs are excluded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from rewards.base import Outcome, RewardInput, Tags, printable, score

TAGS = Tags.of(Prompt())


def _inputs(*completions: str) -> list[RewardInput]:
    return [RewardInput("", text, "eos", "", {}, TAGS) for text in completions]


def _lengths(inputs: Sequence[RewardInput]) -> list[float]:
    return [float(len(one.completion)) for one in inputs]


def _returns(*values: Any) -> Any:
    """A reward function that returns for each input the value whose index is its completion."""
    return lambda inputs: [values[int(one.completion)] for one in inputs]


def test_tags_are_the_configured_ones():
    assert Tags.of(Prompt(answer_open="[", answer_close="]")) == Tags(
        "<reasoning>", "</reasoning>", "[", "]"
    )


def test_a_function_without_errors_is_called_once():
    calls = []

    def function(inputs: Sequence[RewardInput]) -> list[float]:
        calls.append(len(inputs))
        return _lengths(inputs)

    assert score(function, _inputs("a", "bb")) == [Outcome(1.0, None), Outcome(2.0, None)]
    assert calls == [2]
    assert score(_lengths, []) == []


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_every_kind_are_accepted(value: Any, number: float):
    assert score(_returns(value), _inputs("0")) == [Outcome(number, None)]
    assert type(score(_returns(value), _inputs("0"))[0].value) is float


@pytest.mark.parametrize("values", [(1.0, 2.0), np.array([1.0, 2.0]), np.array([1, 2])])
def test_sequences_of_every_kind_are_accepted(values: Any):
    assert [o.value for o in score(lambda _: values, _inputs("a", "b"))] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, "returned None"),
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (np.float32("nan"), "returned nan"),
        ("1.0", "returned a str, not a number"),
        ([1.0], "returned a list, not a number"),
        (Decimal(1), "returned a Decimal, not a number"),
        (1j, "returned a complex, not a number"),
        (10**400, "returned a number that cannot be converted to float"),
    ],
)
def test_an_error_is_not_a_zero(value: Any, error: str):
    first, second, third = score(_returns(0.25, value, 0.0), _inputs("0", "1", "2"))
    assert (first, third) == (Outcome(0.25, None), Outcome(0.0, None))
    assert second.value is None
    assert error in (second.error or "")


def test_only_the_failing_input_is_excluded_when_a_batch_raises():
    def function(inputs: Sequence[RewardInput]) -> list[float]:
        return [1 / len(one.completion) for one in inputs]

    outcomes = score(function, _inputs("a", "", "bb"))
    assert outcomes[0::2] == [Outcome(1.0, None), Outcome(0.5, None)]
    assert outcomes[1] == Outcome(None, "raised ZeroDivisionError: division by zero")


class _Silent(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise KeyboardInterrupt


class _NoFloat(float):
    def __float__(self) -> float:
        raise SystemExit(3)


class _NoIteration(list[float]):
    def __iter__(self) -> Any:
        raise GeneratorExit


class _NoLength(list[float]):
    def __len__(self) -> int:
        raise ValueError("no length")


class _NoClass:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise LookupError("no class")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit("bye\n now"), "raised SystemExit: bye now"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
        (GeneratorExit(), "raised GeneratorExit"),
        (BaseException("base"), "raised BaseException: base"),
        (RecursionError("too deep"), "raised RecursionError: too deep"),
        (_Silent(), "raised _Silent, whose text cannot be shown"),
        (ValueError("a \udc80 b"), r"raised ValueError: a \udc80 b"),
        (ValueError("\0 \x1b[31m \u202e"), r"raised ValueError: \x00 \x1b[31m \u202e"),
        (ValueError("x" * 10**6), "raised ValueError: " + "x" * 181),
    ],
)
def test_invariant_6_every_exception_becomes_a_printable_error(error: BaseException, text: str):
    def fails(inputs: Sequence[RewardInput]) -> list[float]:
        if inputs[0].completion == "bad":
            raise error
        return _lengths(inputs)

    assert score(fails, _inputs("bad")) == [Outcome(None, text)]
    assert score(fails, _inputs("bad", "a", "bad")) == [
        Outcome(None, text),
        Outcome(1.0, None),
        Outcome(None, text),
    ]


def test_invariant_6_endless_recursion_is_an_error():
    def deeper(inputs: Sequence[RewardInput]) -> list[float]:
        return deeper(inputs)

    (outcome,) = score(deeper, _inputs("a"))
    assert (outcome.error or "").startswith("raised RecursionError: maximum recursion depth")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda _: [_NoFloat(1.0)],
            "returned a number that cannot be converted to float: SystemExit: 3",
        ),
        (
            lambda _: [_NoClass()],
            "returned a number that cannot be converted to float: LookupError: no class",
        ),
        (lambda _: _NoClass(), "raised LookupError: no class"),
        (lambda _: _NoIteration([1.0]), "raised GeneratorExit"),
        (lambda _: _NoLength([1.0]), "raised ValueError: no length"),
        (lambda _: [np.timedelta64(1, "s")], "returned a timedelta64, not a number"),
        (lambda _: np.array([1], "m8[ns]"), "returned a ndarray, not a list of 1 numbers"),
        (lambda _: np.array([1], "M8[ns]"), "returned a ndarray, not a list of 1 numbers"),
        (lambda _: np.array([1j]), "returned a complex, not a number"),
        (lambda _: np.array([(1, 2)], "i4,i4"), "returned a tuple, not a number"),
        (lambda _: np.array(["1"]), "returned a str, not a number"),
    ],
)
def test_invariant_6_objects_that_misbehave_are_errors(function: Any, text: str):
    assert score(function, _inputs("a")) == [Outcome(None, text)]


def test_an_array_may_hold_objects():
    values: Any = np.array([2, 3], object)
    assert score(lambda _: values, _inputs("a", "b"))[1] == Outcome(3.0, None)


@given(st.text(st.characters(), max_size=300))
def test_any_text_is_made_printable_and_short(text: str):
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= 200
    assert shown.encode().decode() == shown


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (1.0, "returned a float, not a list of 1 numbers"),
        (np.float64(1.0), "returned a float64, not a list of 1 numbers"),
        (np.array(1.0), "returned a float, not a list of 1 numbers"),
        (None, "returned a NoneType, not a list of 1 numbers"),
        ("1", "returned a str, not a list of 1 numbers"),
        ({0: 1.0}, "returned a dict, not a list of 1 numbers"),
        ([1.0, 2.0], "returned 2 values for 1 completions"),
        ([], "returned 0 values for 1 completions"),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_results_are_not_broadcast(returned: Any, error: str, size: int):
    outcomes = score(lambda _: returned, _inputs(*"abc"[:size]))
    assert outcomes == [Outcome(None, error)] * size


def test_a_batch_with_too_few_values_is_scored_individually():
    outcomes = score(lambda inputs: _lengths(inputs)[:1], _inputs("a", "bb", "ccc"))
    assert [outcome.value for outcome in outcomes] == [1.0, 2.0, 3.0]


VALUES = st.one_of(
    st.none(), st.floats(), st.integers(), st.booleans(), st.text(), st.lists(st.floats())
)


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_every_input_gets_a_finite_value_or_an_error(values: list[Any]):
    outcomes = score(_returns(*values), _inputs(*map(str, range(len(values)))))
    assert len(outcomes) == len(values)
    for value, outcome in zip(values, outcomes, strict=True):
        assert (outcome.value is None) != (outcome.error is None)
        if outcome.value is not None:
            assert math.isfinite(outcome.value)
            assert outcome.value == float(value)
