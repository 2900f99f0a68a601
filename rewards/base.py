"""The contract of reward functions: their inputs, their results, and their errors.

An error is not a zero: a result that is neither a finite number nor None is an `Outcome` with an
error, which is counted, and its rollout is excluded from training. None means that the part does
not apply to a completion: it is left out of the sum. `rewards/forms.py` lists the forms that a
reward function can have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from configs.schema import Config
    from configs.task import AnswerPlace, Prompt

Cause = Literal["raised", "invalid", "not_finite", "timed_out", "died", "not_started"]
"""Why there is no score: the function raised; returned something else than a number; returned NaN
or infinity; exceeded its time limit; ended its process; or its process could not be started."""

NAME_SEPARATOR = "/"
"""Between the name of a part and the names of the numbers that it returns: `format/steps`."""

_SHOWN = 200


@dataclass(frozen=True)
class Tags:
    """The form of a completion: where its answer is, and the tags if it is in tags.

    The tags are those of `prompt`; `answer` is `prompt.answer`, `prefix` is `prompt.answer_prefix`,
    with which every completion begins, `stops` are `rollout.stop_strings`, which may end one.
    """

    reasoning_open: str
    reasoning_close: str
    answer_open: str
    answer_close: str
    answer: AnswerPlace = "tags"
    prefix: str = ""
    stops: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompt: Prompt, *, stops: tuple[str, ...] = ()) -> Tags:
        """The form that the table `prompt` asks for."""
        return cls(
            reasoning_open=prompt.reasoning_open,
            reasoning_close=prompt.reasoning_close,
            answer_open=prompt.answer_open,
            answer_close=prompt.answer_close,
            answer=prompt.answer,
            prefix=prompt.answer_prefix,
            stops=stops,
        )

    @classmethod
    def of_run(cls, config: Config) -> Tags:
        """The form that the configuration of a run asks for."""
        return cls.of(config.prompt, stops=config.rollout.stop_strings)

    @property
    def pairs(self) -> tuple[str, str, str, str]:
        """The four tags."""
        return self.reasoning_open, self.reasoning_close, self.answer_open, self.answer_close


@dataclass(frozen=True)
class RewardInput:
    """Input of a reward function: one completion.

    Attributes:
        prompt: the model's input with turn tokens, without `prompt.answer_prefix`.
        completion: the prefix and the generated text, without the stop token.
        stop_reason: "eos" if it ended with a stop token, "stop_string" if it ended with one of
            `rollout.stop_strings`, which it includes, "length" if it was truncated.
        answer: the reference answer; None if the dataset has none.
        row: all columns of the dataset's row.
        tags: the form of a completion by `prompt`.
        source: name of the row's dataset in a mixture; None without a mixture.
        messages: the turns of a row in chat format, each with "role" and "content"; None for
            other rows.
        prompt_id: number that identifies the prompt in its split.
    """

    prompt: str
    completion: str
    stop_reason: str
    answer: str | None
    row: Mapping[str, object]
    tags: Tags
    source: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    prompt_id: int = 0


@dataclass(frozen=True)
class RewardError:
    """Why a completion has no score, in one printable line with file and line where known."""

    cause: Cause
    message: str


@dataclass(frozen=True)
class Outcome:
    """The result of a reward function for one completion.

    Attributes:
        value: the score; None if the function does not apply, or failed.
        error: why it failed.
        named: the numbers whose sum is `value`, by name, if the function returned several.
    """

    value: float | None
    error: RewardError | None = None
    named: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def failed(cause: Cause, message: str) -> Outcome:
        """An outcome with an error."""
        return Outcome(None, RewardError(cause, printable(message)))


@dataclass(frozen=True)
class RewardFacts:
    """What a process reports about the function of the part `name`; see `rewards.forms.Form`.

    `sha256` is the hash of the file that defines it, if there is one.
    """

    name: str
    kind: str
    needs_answer: bool
    columns: tuple[str, ...]
    sha256: str | None


def to_outcome(value: object) -> Outcome:
    """What a reward function returned for one completion; never raises.

    Accepted are finite numbers of all kinds, None, and mappings of names to finite numbers.
    """
    try:
        return _named(value) if isinstance(value, Mapping) else _number(value)
    except BaseException as error:  # noqa: BLE001 - methods of a returned object may raise anything
        what = f"returned a number that cannot be converted to float: {describe_error(error)}"
        return Outcome.failed("invalid", what)


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, e.g. `KeyError: 'x'`, as one printable line."""
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


def _number(value: Any) -> Outcome:
    if getattr(value, "ndim", None) == 0:  # a scalar, array or tensor of NumPy, JAX or PyTorch
        value = value.item()
    if value is None:
        return Outcome(None)
    if not isinstance(value, Real | Decimal):
        return Outcome.failed("invalid", f"returned a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        return Outcome.failed("not_finite", f"returned {number}")
    return Outcome(number)


def _named(value: Mapping[Any, object]) -> Outcome:
    if not value:
        return Outcome.failed("invalid", "returned an empty mapping, not named numbers")
    named = {}
    for name, one in value.items():
        if not isinstance(name, str):
            return Outcome.failed("invalid", f"returned the name {name!r}, not text")
        outcome = _number(one)
        if outcome.error is not None:
            return Outcome.failed(outcome.error.cause, f"{outcome.error.message} as {name!r}")
        if outcome.value is not None:
            named[name] = outcome.value
    if not named:
        return Outcome(None)
    total = sum(named.values(), 0.0)
    if not math.isfinite(total):
        return Outcome.failed("not_finite", f"returned numbers whose sum is {total}")
    return Outcome(total, named=named)
