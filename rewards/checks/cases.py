"""Cases of the user: completions with the rewards that they must have, one JSON object a line.

    {"completion": "<answer>4</answer>", "row": 17, "expect": 1.0}
    {"name": "bare", "completion": "4", "row": {"q": "2+2?", "answer": "4"}, "expect": {"tags": 0}}
    {"completion": "...", "expect": {"above": "bare"}, "stop_reason": "length"}

`expect` is the weighted sum; or values of parts by name, null where a part does not apply; or
{"above": NAME}, the name of another case. `row` is the number of a row of data.train (a prompt id)
or a row with its columns; without it the first row is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.base import name_hint
from rewards.base import Outcome, RewardInput
from rewards.checks.findings import Finding
from rewards.checks.probes import Probe
from rewards.checks.trial import Trial

ABOVE = "above"
_KEYS = ("name", "completion", "row", "expect", "stop_reason")
_STOP_REASONS = ("eos", "stop_string", "length")
RowOf = Callable[[int | Mapping[str, object] | None], RewardInput]
"""The input of a row by its number or columns; raises ValueError if there is none."""


@dataclass(frozen=True)
class Case:
    """A completion of the user.

    Attributes:
        name: unique.
        given: input of the reward functions.
        expect: the weighted sum; values by part, None where a part does not apply; or the name of
            the case below it.
    """

    name: str
    given: RewardInput
    expect: float | Mapping[str, float | None] | str

    @property
    def probe(self) -> Probe:
        """The case as a probe."""
        return Probe(f"case {self.name}", "case", "a case of yours", -1, self.given)


def parse_cases(text: str, *, file: str, row_of: RowOf, parts: Sequence[str]) -> list[Case]:
    """The cases of a file.

    Args:
        text: its content.
        file: its name, for messages.
        row_of: finds or makes the row of a case.
        parts: names of the reward parts.

    Raises:
        ValueError: with a line for each mistake.
    """
    cases, mistakes = dict[str, tuple[int, Case]](), list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            case = _parse(line, number, row_of=row_of, parts=parts)
            if case.name in cases:
                raise ValueError(f"name {case.name!r} is also that of line {cases[case.name][0]}")
            cases[case.name] = number, case
        except ValueError as error:
            mistakes.append(f"{file}:{number}: {error}")
    for number, case in cases.values():
        if isinstance(case.expect, str) and case.expect not in cases:
            hint = name_hint(case.expect, list(cases))
            what = f"expect.above: no case is named {case.expect!r}{hint}"
            mistakes.append(f"{file}:{number}: {what}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    if not cases:
        raise ValueError(f"{file}: has no cases")
    return [case for _, case in cases.values()]


def mismatches(cases: Sequence[Case], trial: Trial) -> Iterator[Finding]:
    """A finding for each expectation that is not met."""
    own_scores = [one for one in trial.scored if one.probe.kind == "case"]
    scored = {case.name: one for case, one in zip(cases, own_scores, strict=True)}
    for case in cases:
        own, expect = scored[case.name], case.expect
        total, wrong = f"the weighted sum is {_shown(own.total)}", list[str]()
        if isinstance(expect, str):
            lower = scored[expect].total
            if own.total is None or lower is None or own.total <= lower:
                wrong = [f"{total}, expected above {expect!r}, which has {_shown(lower)}"]
        elif not isinstance(expect, Mapping):
            if not _equal(own.total, expect):
                wrong = [f"{total}, expected {expect:g}"]
        else:
            for name, value in expect.items():
                outcome = own.outcomes[name]
                if outcome.error is not None or not _equal(outcome.value, value):
                    wrong.append(f"{name!r} is {_result(outcome)}, expected {_shown(value)}")
        for what in wrong:
            advice = "change the reward, or the expectation"
            yield Finding("case", fails=True, what=f"case {case.name!r}: {what}", advice=advice)


def _parse(line: str, number: int, *, row_of: RowOf, parts: Sequence[str]) -> Case:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, not an object")
    unknown = [key for key in found if key not in _KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}{name_hint(unknown[0], _KEYS)}")
    completion: Any = found.get("completion")
    name = found.get("name", f"line {number}")
    for key, value in (("completion", completion), ("name", name)):
        if not isinstance(value, str):
            raise ValueError(f"{key}: must be text")
    stop_reason = found.get("stop_reason", "eos")
    if stop_reason not in _STOP_REASONS:
        raise ValueError(f"stop_reason: must be one of {', '.join(_STOP_REASONS)}")
    row = found.get("row")
    if not (row is None or isinstance(row, Mapping) or _is_number(row, int)):
        raise ValueError("row: must be the number of a row, or an object with its columns")
    given = replace(row_of(row), completion=completion, stop_reason=stop_reason)
    return Case(name, given, _expected(found.get("expect"), parts))


def _expected(expect: Any, parts: Sequence[str]) -> float | Mapping[str, float | None] | str:
    if _is_number(expect, int | float):
        return float(expect)
    if not isinstance(expect, Mapping) or not expect:
        raise ValueError('expect: must be a number, {PART: number} or {"above": NAME}')
    if isinstance(expect.get(ABOVE), str):
        if len(expect) > 1:
            raise ValueError('expect: "above" stands alone; write another case for the rest')
        return str(expect[ABOVE])
    for name, value in expect.items():
        if name not in parts:
            raise ValueError(f"expect: no part is named {name!r}{name_hint(name, parts)}")
        if not (value is None or _is_number(value, int | float)):
            raise ValueError(f"expect.{name}: must be a number or null")
    return expect


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _equal(value: float | None, expected: float | None) -> bool:
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _result(outcome: Outcome) -> str:
    return _shown(outcome.value) if outcome.error is None else f"an error ({outcome.error.message})"
