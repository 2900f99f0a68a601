"""Calls reward functions that were written for verl and OpenRLHF.

    verl        compute_score(data_source, solution_str, ground_truth, extra_info)
    verl        compute_score(data_sources, solution_strs, ground_truths, extra_infos)
    OpenRLHF    reward_func(queries, prompts, labels)

Each becomes a function of one of the forms in `rewards/forms.py`. The ground truth, or label, is
the reference answer. `data_source` and `extra_info` are the columns of these names; without them
the name of the row's dataset in a mixture, and all columns. Of a mapping that verl's functions
return for a completion, and OpenRLHF's for a batch, `score` or `rewards` counts; the rest is
ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rewards.base import RewardInput

Function = Callable[..., Any]

_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_OPENRLHF = ("queries", "prompts", "labels")


def library_parameters(names: Collection[str]) -> frozenset[str]:
    """The parameters that verl or OpenRLHF fill in; empty if the function is for neither.

    >>> sorted(library_parameters(["solution_str", "ground_truth", "scale"]))
    ['ground_truth', 'solution_str']
    >>> sorted(library_parameters(["completion", "queries"]))
    []
    """
    if not {"completion", "completions"}.isdisjoint(names):
        return frozenset()  # a form of this project or of TRL, with a column of that name
    for key, filled in (
        ("solution_str", _VERL),
        ("solution_strs", _VERL_BATCH),
        ("queries", _OPENRLHF),
    ):
        if key in names:
            return frozenset(filled).intersection(names)
    return frozenset()


def adapted(call: Function, names: frozenset[str]) -> Function:
    """A function in a form of this project that calls one of verl or OpenRLHF.

    Args:
        call: the function, with its other arguments.
        names: of `library_parameters`.
    """

    def call_with(*values: object, library: Sequence[str]) -> Any:
        given = zip(library, values, strict=True)
        return call(**{name: value for name, value in given if name in names})

    def openrlhf(inputs: Sequence[RewardInput]) -> object:
        prompts = [one.prompt for one in inputs]
        queries = [one.prompt + one.completion for one in inputs]
        labels = [one.answer for one in inputs]
        return _part(call_with(queries, prompts, labels, library=_OPENRLHF), "rewards")

    def verl_batch(inputs: Sequence[RewardInput]) -> object:
        sources = [_data_source(one.row, one.source) for one in inputs]
        texts = [one.completion for one in inputs]
        answers = [one.answer for one in inputs]
        infos = [_extra_info(one.row) for one in inputs]
        found = call_with(sources, texts, answers, infos, library=_VERL_BATCH)
        return [_part(one, "score") for one in found] if isinstance(found, list) else found

    def verl(completion: str, *, answer: str, row: Mapping[str, object], source: str) -> object:
        values = (_data_source(row, source), completion, answer, _extra_info(row))
        return _part(call_with(*values, library=_VERL), "score")

    async def verl_async(
        completion: str, *, answer: str, row: Mapping[str, object], source: str
    ) -> object:
        values = (_data_source(row, source), completion, answer, _extra_info(row))
        return _part(await call_with(*values, library=_VERL), "score")

    if "queries" in names:
        return openrlhf
    if "solution_strs" in names:
        return verl_batch
    return verl_async if is_async(call) else verl


def is_async(call: Function) -> bool:
    """Whether a function, or the `__call__` of an object, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (call, type(call).__call__)))


def _part(found: object, name: str) -> object:
    return found[name] if isinstance(found, Mapping) and name in found else found


def _data_source(row: Mapping[str, object], source: str | None) -> object:
    return row.get("data_source", source or "")


def _extra_info(row: Mapping[str, object]) -> object:
    return row.get("extra_info", row)
