"""What a reward function may return: an error is not a zero, None is not an error."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rewards.base import Cause, Outcome, RewardError, describe_error, to_outcome


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        *((number, Outcome(0.5)) for number in (0.5, np.float32(0.5), np.array(0.5))),
        *((number, Outcome(3.0)) for number in (3, np.int64(3))),
        *((number, Outcome(0.25)) for number in (Decimal("0.25"), Fraction(1, 4))),
        (None, Outcome(None)),
        ({"steps": None, "form": None}, Outcome(None)),
        (
            {"form": 1, "steps": 0.5, "tone": None},
            Outcome(1.5, named={"form": 1.0, "steps": 0.5}),
        ),
    ],
)
def test_numbers_of_every_kind_are_accepted(value: Any, outcome: Outcome):
    """None means that the function does not apply, and is no error."""
    found = to_outcome(value)
    assert found == outcome
    assert type(found.value) is type(outcome.value)


class _NoFloat(float):
    def __float__(self) -> float:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("value", "cause", "message"),
    [
        (math.nan, "not_finite", "returned nan"),
        ("1.0", "invalid", "returned a str, not a number"),
        (Decimal("nan"), "not_finite", "returned nan"),
        (np.array([1.0]), "invalid", "returned a ndarray, not a number"),
        (10**400, "invalid", "returned a number that cannot be converted to float"),
        (_NoFloat(1.0), "invalid", "returned a number that cannot be converted to float: Syst"),
        ({}, "invalid", "returned an empty mapping, not named numbers"),
        ({"a": math.inf}, "not_finite", "returned inf as 'a'"),
    ],
)
def test_promise_5_an_error_is_not_a_zero(value: Any, cause: Cause, message: str):
    found = to_outcome(value)
    assert found.value is None
    assert found.error is not None
    assert (found.error.cause, found.error.message[: len(message)]) == (cause, message)


class _Silent(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit("bye\n now"), "SystemExit: bye now"),
        (_Silent(), "_Silent, whose text cannot be shown"),
        (ValueError("a \udc80 b"), r"ValueError: a \udc80 b"),
        (ValueError("\0 \x1b[31m \u202e"), r"ValueError: \x00 \x1b[31m \u202e"),
        (ValueError("x" * 10**6), "ValueError: " + "x" * 188),
    ],
)
def test_every_exception_is_described_in_one_printable_line(error: BaseException, text: str):
    assert describe_error(error) == text
    assert Outcome.failed("raised", text) == Outcome(None, RewardError("raised", text))
