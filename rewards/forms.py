"""The forms that a reward function can have, recognised by its signature.

    form      signature                                          called with
    sample    def f(completion, *, answer, **columns)            one completion
    async     async def f(completion, *, answer, **columns)      several at a time, in one process
    batch     def f(inputs)                                      a sequence of RewardInput
    trl       def f(prompts, completions, **columns)             lists, by keyword

Functions of verl are of the form sample or async, or with lists batch, as those of OpenRLHF;
docs/rewards.md says what each gets and may return. A value must depend on its own completion only:
completions come in any order and in batches of any size, and after an error they are scored again
one by one.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import inspect
import json
import traceback
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from configs.base import name_hint
from configs.toml_text import show_value
from rewards.base import Outcome, RewardInput, describe_error, to_outcome

Kind = Literal["sample", "async", "batch", "trl"]
Offered = Mapping[str, Callable[[RewardInput], object]]
"""What a function can get for a completion besides columns, by parameter."""
Scored = tuple[int, Outcome, str]
"""Position of an input, its outcome, and the traceback of its error ("" without one)."""

EXAMPLES: Mapping[Kind, str] = {
    "sample": "def f(completion, *, answer, **columns) -> float",
    "async": "async def f(completion, *, answer, **columns) -> float",
    "batch": "def f(inputs) -> list of one number for each RewardInput",
    "trl": "def f(prompts, completions, **columns) -> list of one number for each completion",
}
_OWN: Offered = {
    name: attrgetter(name)
    for name in ("answer", "prompt", "stop_reason", "tags", "source", "messages", "row")
}
_TRL: Offered = {
    "answer": attrgetter("answer"),
    "prompts": lambda one: one.prompt if one.messages is None else list(one.messages),
    "completions": lambda one: (
        one.completion
        if one.messages is None
        else [{"role": "assistant", "content": one.completion}]
    ),
}
_TRL_MISSING = ("completion_ids", "trainer_state")
"""What TRL passes and this project does not have."""
_VERL: Offered = {
    "data_source": lambda one: one.row.get("data_source", one.source or ""),
    "solution_str": attrgetter("completion"),
    "ground_truth": attrgetter("answer"),
    "extra_info": lambda one: one.row.get("extra_info", one.row),
}
_VERL_BATCH: Offered = {f"{name}s": get for name, get in _VERL.items()}
_OPENRLHF: Offered = {
    "queries": lambda one: one.prompt + one.completion,
    "prompts": attrgetter("prompt"),
    "labels": attrgetter("answer"),
}


@dataclass(frozen=True)
class Form:
    """A reward function that is ready to be called.

    Attributes:
        kind: its form.
        call: the function with its arguments, or the constructed object.
        offered: what it gets for each completion; None: the inputs themselves.
        names: columns that it names.
        required: parameters without a default that it gets.
        hidden: columns that it does not get as one of all.
        takes_all: whether it takes all columns (`**columns`).
        needs_answer: whether it cannot be called without a reference answer.
        key: of a mapping that it returns, the value that counts; "": all values are named numbers.
    """

    kind: Kind
    call: Callable[..., Any]
    offered: Offered | None
    names: frozenset[str] = frozenset()
    required: tuple[str, ...] = ()
    hidden: Collection[str] = ()
    takes_all: bool = False
    needs_answer: bool = False
    key: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the dataset that it cannot be called without."""
        return tuple(name for name in self.required if name not in (self.offered or ()))

    def score(self, inputs: Sequence[RewardInput]) -> Iterator[Scored]:
        """Scores inputs in order; never raises because of the function or its results.

        If a batch fails, its inputs are scored one by one, so that only failing inputs get an
        error. Results are not broadcast: a single number for a batch is an error.
        """
        if self.kind == "sample":
            for index, one in enumerate(inputs):
                yield (index, *_guarded(lambda one=one: self._result(self._call_one(one))))  # type: ignore[misc]
            return
        try:
            values = self._call_batch(inputs)
        except BaseException:  # noqa: BLE001 - a user's code may raise anything
            values = None
        if values is not None:
            yield from ((index, to_outcome(value), "") for index, value in enumerate(values))
            return
        for index, one in enumerate(inputs):
            yield (index, *_guarded(lambda one=one: self._call_batch([one])[0]))  # type: ignore[misc]

    async def score_one(self, one: RewardInput, *, timeout_s: float) -> tuple[Outcome, str]:
        """Scores one input with an async function; raises TimeoutError at the time limit."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return to_outcome(self._result(await self._call_one(one))), ""
        except BaseException as error:
            if limit.expired():
                raise TimeoutError from error
            return _failure(error)

    def _result(self, returned: Any) -> Any:
        """What a function returned, or the value of a mapping that counts."""
        is_mapping = self.key and isinstance(returned, Mapping)
        return returned[self.key] if is_mapping and self.key in returned else returned

    def _call_one(self, one: RewardInput) -> Any:
        given = self._given(one)
        return self.call(**given) if self.key else self.call(one.completion, **given)

    def _call_batch(self, inputs: Sequence[RewardInput]) -> Sequence[object]:
        """The values of a batch, one for each completion."""
        if self.offered is None:
            returned = self.call(tuple(map(copy.deepcopy, inputs)))
        else:
            rows = [self._given(one) for one in inputs]
            names = dict.fromkeys(name for row in rows for name in row)
            returned = self.call(**{name: [row.get(name) for row in rows] for name in names})
        return [self._result(value) for value in _values(self._result(returned), len(inputs))]

    def _given(self, one: RewardInput) -> dict[str, object]:
        """The keyword arguments for one input, copied: a function may change what it is given."""
        assert self.offered is not None
        columns = {
            name: value
            for name, value in one.row.items()
            if name in self.names or (self.takes_all and name not in self.hidden)
        }
        return copy.deepcopy({**columns, **{name: get(one) for name, get in self.offered.items()}})


def recognise(function: object, args: Mapping[str, object]) -> Form:
    """The form of a function or class with these arguments.

    Raises:
        ValueError: if it has none of the forms, lacks one of the arguments, or is a class whose
            construction fails; the message shows the forms.
    """
    call, args = _callable(function, args)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        raise ValueError(f"has no readable signature; wrap it in a function: {_forms()}") from None
    form, filled = _kind(call, parameters)
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in filled
        and parameter.kind in {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    }
    takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    _check_names(args, named, takes_all=takes_all)
    _check_values(call, args)
    required = tuple(
        name
        for name, parameter in named.items()
        if parameter.default is Parameter.empty and name not in args
    )
    missing = [name for name in required if form.kind == "trl" and name in _TRL_MISSING]
    if missing:
        raise ValueError(f"needs {missing[0]!r}, which TRL passes and this project does not have")
    form = replace(form, call=partial(call, **args) if args else call)
    if form.kind == "batch" or form.key:  # they get no columns
        if required:
            raise ValueError(
                f"has the parameter {required[0]!r} without a default; set args.{required[0]}"
            )
        return form
    assert form.offered is not None
    if form.kind == "trl":
        gets = {*filled, *named, *(form.offered if takes_all else ())}
        hidden = {"prompt", "completion", "completion_ids"}
    else:
        gets, hidden = {*named, *(("answer",) if takes_all else ())}, {"completion"}
    return replace(
        form,
        offered={name: form.offered[name] for name in form.offered if name in gets - args.keys()},
        names=frozenset(named) - args.keys() - form.offered.keys(),
        required=required,
        hidden=hidden | args.keys(),
        takes_all=takes_all,
        needs_answer="answer" in required,
    )


def _callable(
    function: object, args: Mapping[str, object]
) -> tuple[Callable[..., Any], Mapping[str, object]]:
    """What is called, and the arguments that it still needs: a class is constructed with all."""
    if isinstance(function, type):
        _check_values(function.__init__, args)  # type: ignore[misc]
        try:
            call = function(**args)
        except BaseException as error:
            given = ", ".join(f"{name} = {show_value(value)}" for name, value in args.items())
            what = f"constructing it with {given or 'no arguments'} raises {describe_error(error)}"
            raise ValueError(what) from error
        if not callable(call):
            raise ValueError(
                f"objects of the class cannot be called: it has no __call__; {_forms()}"
            )
        return call, {}
    if callable(function):
        return function, args
    raise ValueError(f"is of type {type(function).__name__}, not a function or class; {_forms()}")


def _kind(
    call: Callable[..., Any], parameters: Mapping[str, Parameter]
) -> tuple[Form, Collection[str]]:
    """The form without columns, and the parameters that take completions."""
    is_async = any(map(inspect.iscoroutinefunction, (call, type(call).__call__)))
    positional = [
        name
        for name, one in parameters.items()
        if one.kind in {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
    ]
    required = [name for name in positional if parameters[name].default is Parameter.empty]
    one_at_a_time: Kind = "async" if is_async else "sample"
    if positional[:1] == ["completion"]:
        return Form(one_at_a_time, call, _OWN), ("completion",)
    # `completions` makes it one of TRL, with columns of these names.
    library = {} if "completions" in parameters else parameters
    if "solution_str" in library:
        offered = _named(_VERL, parameters)
        return Form(one_at_a_time, call, offered, needs_answer=True, key="score"), offered
    if is_async:
        raise ValueError(f"is async, and its first parameter is not completion; {_forms('async')}")
    for first, known, key in (
        ("solution_strs", _VERL_BATCH, "score"),
        ("queries", _OPENRLHF, "rewards"),
    ):
        if first in library:
            offered = _named(known, parameters)
            return Form("batch", call, offered, key=key), offered
    if "completions" in parameters:
        return Form("trl", call, _TRL), _TRL.keys() & parameters.keys() - {"answer"}
    if len(required) == 1:
        return Form("batch", call, None), required
    shown = ", ".join(parameters) or "none"
    raise ValueError(f"has the parameters {shown}; {_forms()}")


def _named(offered: Offered, parameters: Collection[str]) -> Offered:
    return {name: get for name, get in offered.items() if name in parameters}


def _check_names(
    args: Mapping[str, object], parameters: Collection[str], *, takes_all: bool
) -> None:
    """Refuses arguments that are no parameters, or that look like one and reach `**columns`."""
    for name in sorted(args.keys() - set(parameters)):
        if not takes_all or difflib.get_close_matches(name, parameters, n=1):
            hint = name_hint(name, parameters)
            raise ValueError(f"has no parameter {name!r} for args.{name}{hint}")


def _check_values(call: Callable[..., Any], args: Mapping[str, object]) -> None:
    """Refuses arguments that do not suit their annotations, as far as pydantic can read these."""
    try:
        hints = typing.get_type_hints(call, include_extras=True)
    except Exception:  # noqa: BLE001 - annotations of a user may be anything
        return
    mistakes = []
    for name, value in args.items():
        try:
            # As JSON an array is a tuple, too, and an integer a float.
            text = json.dumps(value, default=str)
            TypeAdapter(hints.get(name, Any)).validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, (name, *first["loc"])))
            mistakes.append(f"args.{place} = {value!r}: {first['msg']}")
        except Exception:  # noqa: BLE001 - as above
            continue
    if mistakes:
        raise ValueError("; ".join(mistakes))


def _forms(*kinds: Kind) -> str:
    return "write " + ", or ".join(EXAMPLES[kind] for kind in kinds or EXAMPLES)


def _values(returned: Any, count: int) -> Sequence[object]:
    """The values of a list, tuple or array, one for each completion."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        raise _WrongResult(
            f"returned a {type(returned).__name__}, not a list of {count} number; the parameter of "
            "a function of one completion is named completion"
        )
    if len(values) != count:
        raise _WrongResult(f"returned {len(values)} values for {count} completion")
    return values


class _WrongResult(Exception):  # noqa: N818
    """A result of the wrong shape."""


def _guarded(call: Callable[[], object]) -> tuple[Outcome, str]:
    """The outcome of a call for one input, and the traceback of its error."""
    try:
        return to_outcome(call()), ""
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
        return _failure(error)


def _failure(error: BaseException) -> tuple[Outcome, str]:
    if isinstance(error, _WrongResult):
        return Outcome.failed("invalid", f"{error}"), ""
    frames = traceback.extract_tb(error.__traceback__, limit=-50)
    own = [frame for frame in frames if frame.filename != __file__]  # of the user's code
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    text = "".join(traceback.format_exception(error))
    return Outcome.failed("raised", f"raised {describe_error(error)[:120]}{where}"), text
