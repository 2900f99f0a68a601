"""The contract of reward functions: their inputs, their results, and their errors.

An error is not a zero: any result that is not a finite number becomes an `Outcome` without a value,
which is counted and excluded from training. Exceptions are such errors, `KeyboardInterrupt`
included. Time limits are not handled here: the process pool that calls reward functions kills
calls that do not return.
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
    """The tags around the reasoning and the answer of a completion."""

    reasoning_open: str
    reasoning_close: str
    answer_open: str
    answer_close: str

    @classmethod
    def of(cls, prompt: Prompt) -> Tags:
        """The tags of the configuration."""
        return cls(
            reasoning_open=prompt.reasoning_open,
            reasoning_close=prompt.reasoning_close,
            answer_open=prompt.answer_open,
            answer_close=prompt.answer_close,
        )


@dataclass(frozen=True)
class RewardInput:
    """Input of a reward function: one completion.

    Attributes:
        prompt: the model's input with turn tokens, without `prompt.answer_prefix`.
        completion: the prefix and the generated text, without the stop token.
        stop_reason: "eos" if it ended with a stop token, "stop_string" if it ended with one of
            `rollout.stop_strings`, which it includes, "length" if it was truncated.
        answer: the reference answer.
        row: all columns of the dataset's row.
        tags: the configured tags.
        source: name of the row's dataset in a mixture; None without a mixture.
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
    """A score or an error; exactly one of the two is set."""

    value: float | None
    error: str | None


# Takes a batch and returns one number per input, in order; None for a completion that it cannot
# score. A value must depend on its own input only: after an error, inputs are scored individually.
RewardFunction = Callable[[Sequence[RewardInput]], Sequence[float | None]]


def score(function: RewardFunction, inputs: Sequence[RewardInput]) -> list[Outcome]:
    """Scores `inputs`, one outcome each; never raises because of `function` or its results.

    If a batch fails, its inputs are scored individually, so that only failing inputs get an error.
    Results are not broadcast: a single number for a batch is an error.
    """
    values = _call(function, inputs)
    if not isinstance(values, str):
        return [_outcome(value) for value in values]
    if len(inputs) == 1:
        return [Outcome(None, values)]
    return [outcome for one in inputs for outcome in score(function, [one])]


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, e.g. `KeyError: 'x'`, as one printable line.

    Never raises, even if the exception's own methods do.
    """
    name = type(error).__name__
    try:
        text = f"{error}"
        return printable(f"{name}: {text}" if text else name)
    except BaseException:  # noqa: BLE001 - a user's `__str__` may raise anything
        return printable(f"{name}, whose text cannot be shown")


def printable(text: str) -> str:
    """One line of at most 200 printable characters.

    White space is collapsed. Unprintable characters, including lone surrogates and control
    characters, are escaped as in a Python string.
    """
    line = " ".join(text[: 10 * _SHOWN].split())[:_SHOWN]
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(escaped)[:_SHOWN]


def _call(function: RewardFunction, inputs: Sequence[RewardInput]) -> list[object] | str:
    """The function's results, one value per input, or an error message."""
    try:
        returned: Any = function(tuple(inputs))
        # `tolist` converts nanosecond times to integers, which would be accepted as numbers.
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
    except BaseException as error:  # noqa: BLE001 - methods of a returned object may raise anything
        what = f"returned a number that cannot be converted to float: {describe_error(error)}"
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
