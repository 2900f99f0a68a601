"""The reward contract: what a reward function is given, what it returns, and what goes wrong.

An error is not a zero: whatever is no finite number is an `Outcome` without a value, which is
counted and excluded from learning. Whatever a function raises is such an error, `KeyboardInterrupt`
included. A call that never returns is not dealt with here; whoever runs rewards in a process of
their own ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from configs.schema import Prompt

_SHOWN = 200


@dataclass(frozen=True)
class Tags:
    """The strings around the two parts of a completion."""

    reasoning_open: str
    reasoning_close: str
    answer_open: str
    answer_close: str

    @classmethod
    def of(cls, prompt: Prompt) -> Tags:
        """The tags that the configuration asks for."""
        return cls(
            reasoning_open=prompt.reasoning_open,
            reasoning_close=prompt.reasoning_close,
            answer_open=prompt.answer_open,
            answer_close=prompt.answer_close,
        )


@dataclass(frozen=True)
class RewardInput:
    """A completion to be scored.

    Attributes:
        prompt: what the model read, turn tokens included, `prompt.answer_prefix` not.
        completion: that prefix and what it wrote, without the stop token.
        stop_reason: "eos" if it ended with a stop token, "stop_string" if with a text that ends a
            completion and is part of it, "length" if it was cut.
        answer: the reference answer.
        row: all columns of the dataset's row.
        tags: the configured tags.
        source: name of the row's dataset in a mixture; None: there is no mixture.
    """

    prompt: str
    completion: str
    stop_reason: str
    answer: str
    row: Mapping[str, object]
    tags: Tags
    source: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A score, or why there is none; exactly one of the two is set."""

    value: float | None
    error: str | None


# Takes a batch and returns as many numbers, in order; None for a completion it cannot score. A
# value may depend on its own input only: after an error inputs are scored one by one.
RewardFunction = Callable[[Sequence[RewardInput]], Sequence[float | None]]


def score(function: RewardFunction, inputs: Sequence[RewardInput]) -> list[Outcome]:
    """Score `inputs`, one outcome each; never raises because of `function` or what it returns.

    A batch that fails as a whole is scored again input by input, so that only those at fault go
    without a value. Nothing is broadcast: a single number for a batch is an error.
    """
    values = _call(function, inputs)
    if not isinstance(values, str):
        return [_outcome(value) for value in values]
    if len(inputs) == 1:
        return [Outcome(None, values)]
    return [outcome for one in inputs for outcome in score(function, [one])]


def describe_error(error: BaseException) -> str:
    """Type and text of an exception, e.g. `KeyError: 'x'`: one printable line of limited length.

    Never raises, whatever the exception's own methods do.
    """
    name = type(error).__name__
    try:
        text = f"{error}"
        return printable(f"{name}: {text}" if text else name)
    except BaseException:  # noqa: BLE001 - a user's `__str__` may raise anything
        return printable(f"{name}, whose text cannot be shown")


def printable(text: str) -> str:
    """One line of at most 200 characters that any file, terminal or encoding takes.

    White space is collapsed. What cannot be printed, lone surrogates and control characters among
    them, is escaped as in a Python string.
    """
    line = " ".join(text[: 10 * _SHOWN].split())[:_SHOWN]
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(escaped)[:_SHOWN]


def _call(function: RewardFunction, inputs: Sequence[RewardInput]) -> list[object] | str:
    """What the function returned, as many values as inputs, or what went wrong."""
    try:
        returned: Any = function(tuple(inputs))
        # Times are stored as integers, but they are no numbers.
        if isinstance(returned, np.ndarray) and returned.dtype.kind not in "mM":
            returned = returned.tolist()
        if not isinstance(returned, list | tuple):
            name = type(returned).__name__
            return printable(f"returned a {name}, not a list of {len(inputs)} numbers")
        values = list(returned)
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
        return printable(f"raised {describe_error(error)}")
    if len(values) != len(inputs):
        return f"returned {len(values)} values for {len(inputs)} completions"
    return values


def _outcome(value: object) -> Outcome:
    try:
        return _number(value)
    except BaseException as error:  # noqa: BLE001 - so may the methods of what it returns
        what = f"returned a number that is no float: {describe_error(error)}"
        return Outcome(None, printable(what))


def _number(value: object) -> Outcome:
    is_time = isinstance(value, np.datetime64 | np.timedelta64)
    if isinstance(value, np.generic) and not is_time:
        value = value.item()
    if value is None:
        return Outcome(None, "returned None: cannot score this one")
    if is_time or not isinstance(value, Real):
        return Outcome(None, printable(f"returned a {type(value).__name__}, not a number"))
    number = float(value)
    if not math.isfinite(number):
        return Outcome(None, f"returned {number}")
    return Outcome(number, None)
