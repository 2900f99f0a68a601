"""Cases of the user: completions with the rewards that they must have, one JSON object a line.

"Try it offline" in docs/rewards.md has their form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.base import name_hint
from rewards.base import RewardInput
from rewards.checks.findings import Finding
from rewards.checks.probes import Probe
from rewards.checks.trial import Scored, Trial

RowOf = Callable[[int | Mapping[str, object] | None], RewardInput]
"""The input of a row by its number or columns; raises ValueError if there is none."""


class Above(BaseModel):
    """Another case, which must have a lower weighted sum."""

    model_config = ConfigDict(extra="forbid", strict=True)
    above: str


class Case(BaseModel):
    """A line of the file; `name` is unique."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    name: str = ""
    completion: str
    row: int | dict[str, Any] | None = None
    expect: float | Above | dict[str, float | None]
    stop_reason: Literal["eos", "stop_string", "length"] = "eos"


def parse_cases(
    text: str, *, file: str, row_of: RowOf, parts: Sequence[str]
) -> list[tuple[Case, Probe]]:
    """The cases of a file with this text, each with its probe.

    Raises:
        ValueError: with a line for each mistake.
    """
    found, mistakes = dict[str, tuple[Case, Probe]](), list[str]()
    lines = [
        (number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()
    ]
    for number, line in lines:
        try:
            case = _read(line, number)
            if case.name in found:
                raise ValueError(f"name {case.name!r}: an earlier line has it")
            for part in case.expect.keys() - set(parts) if isinstance(case.expect, dict) else ():
                raise ValueError(f"expect: no part is named {part!r}{name_hint(part, parts)}")
            row = row_of(case.row)
        except ValueError as error:
            mistakes.append(f"{file}:{number}: {error}")
            continue
        given = replace(row, completion=case.completion, stop_reason=case.stop_reason)
        found[case.name] = case, Probe(f"case {case.name}", "case", -1, given)
    for case, _ in found.values():
        if isinstance(case.expect, Above) and case.expect.above not in found:
            hint = name_hint(case.expect.above, list(found))
            mistakes.append(f"{file}: expect.above: no case is named {case.expect.above!r}{hint}")
    if mistakes or not found:
        raise ValueError("\n".join(mistakes) or f"{file}: has no cases")
    return list(found.values())


def _read(line: str, number: int) -> Case:
    """A line of the file."""
    try:
        case = Case.model_validate_json(line)
        return case if case.name else case.model_copy(update={"name": f"line {number}"})
    except ValidationError as error:
        found = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        raise ValueError("; ".join(": ".join(filter(None, one)) for one in found)) from None


def mismatches(cases: Sequence[Case], trial: Trial) -> Iterator[Finding]:
    """A finding for each expectation that is not met."""
    own = [one for one in trial.scored if one.probe.kind == "case"]
    scored = {case.name: one for case, one in zip(cases, own, strict=True)}
    for case in cases:
        for what in _mismatches(case, scored):
            advice = "change the reward, or the expectation"
            yield Finding("case", fails=True, what=f"case {case.name!r}: {what}", advice=advice)


def _mismatches(case: Case, scored: Mapping[str, Scored]) -> Iterator[str]:
    own, expect = scored[case.name], case.expect
    total = f"the weighted sum is {_shown(own.total)}"
    if isinstance(expect, Above):
        lower = scored[expect.above].total
        if own.total is None or lower is None or own.total <= lower:
            yield f"{total}, expected above {expect.above!r}, which has {_shown(lower)}"
    elif not isinstance(expect, Mapping):
        if not _equal(own.total, expect):
            yield f"{total}, expected {expect:g}"
    else:
        for name, value in expect.items():
            outcome = own.outcomes[name]
            if outcome.error is not None:
                error = outcome.error.message
                yield f"{name!r} is an error ({error}), expected {_shown(value)}"
            elif not _equal(outcome.value, value):
                yield f"{name!r} is {_shown(outcome.value)}, expected {_shown(value)}"


def _equal(value: float | None, expected: float | None) -> bool:
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
