"""Several runs compared: paired evaluations, what an accuracy took, settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.resume import diff_configs
from configs.toml_text import show_value
from pipeline.evaluate.summary import mean_of
from pipeline.run.record_files import DamagedFileError
from pipeline.run.report.paired import paired_change
from pipeline.run.report.run_records import Row, RunRecords

TARGETS = 4
"""Values of the validation metric whose price is shown."""
_OWN_SETTINGS = ("run.", "wandb.")
"""Begins of settings that differ by nature."""


@dataclass(frozen=True)
class Pair:
    """Two runs on the evaluation prompts that both have.

    Attributes:
        first: name of a run.
        second: name of another.
        evaluation: `test_after` or `validation`.
        change: from the first to the second, as `evaluation.compare` returns it; None: it cannot be
            computed, for the reason in `why`.
        why: "" if there is a change.
    """

    first: str
    second: str
    evaluation: str
    change: Mapping[str, Any] | None
    why: str = ""


@dataclass(frozen=True)
class Reached:
    """What a run took to its first validation at or above a value.

    Attributes:
        step: training steps; None: it did not get there.
        seconds: of the run.
        tokens: generated for training.
        usd: dollars.
    """

    step: int | None = None
    seconds: float | None = None
    tokens: float | None = None
    usd: float | None = None


def pairs(runs: Sequence[RunRecords]) -> Iterator[Pair]:
    """Each later run compared with the first."""
    first = runs[0]
    for other in runs[1:]:
        yield _pair(first, other)


def _pair(first: RunRecords, second: RunRecords) -> Pair:
    for name in ("test_after", "validation"):
        found = [run.evaluations(name)[-1:] for run in (first, second)]
        if not all(found):
            continue
        (one,), (other,) = found
        if one["metric"] != other["metric"]:
            why = f"{one['metric']} and {other['metric']} are different metrics"
            return Pair(first.name, second.name, name, None, why)
        try:
            rows = first.rollouts(one["file"]), second.rollouts(other["file"])
        except DamagedFileError as error:
            return Pair(first.name, second.name, name, None, str(error))
        change = paired_change(*rows, summary=one)
        why = "" if change else "no prompt in common"
        return Pair(first.name, second.name, name, change, why)
    return Pair(first.name, second.name, "", None, "no evaluation that both have")


def targets(runs: Sequence[RunRecords]) -> list[float]:
    """Values of the validation metric between the lowest first and the highest best one."""
    means = [[mean_of(one) or 0.0 for one in run.evaluations("validation")] for run in runs]
    known = [own for own in means if own]
    if not known:
        return []
    low, high = min(own[0] for own in known), max(max(own) for own in known)
    if high <= low:
        return [high]
    return [low + (high - low) * part / TARGETS for part in range(1, TARGETS + 1)]


def reached(run: RunRecords, target: float) -> Reached:
    """What the run took to its first validation at or above the target."""
    for found in run.evaluations("validation"):
        if (mean_of(found) or 0.0) >= target:
            break
    else:
        return Reached()
    step = found["step"]
    before = [row for row in run.metrics if row["step"] <= step]
    last: Row = before[-1] if before else {}
    generated = [count for at, count in run.tokens if at <= step]
    tokens = sum(generated) if len(generated) == len(before) else None
    usd = last.get("cost/usd") if before else 0.0
    return Reached(step, last.get("time/elapsed_s"), tokens, usd)


def differing_settings(runs: Sequence[RunRecords]) -> list[tuple[str, ...]]:
    """Each setting that differs, with its value in each run."""
    first = runs[0].config
    changes = [
        {key: after for key, _, after in diff_configs(first, run.config)} for run in runs[1:]
    ]
    flat = {key: value for key, _, value in diff_configs({}, first)}
    keys = dict.fromkeys(key for own in changes for key in own)
    return [
        (
            key,
            show_value(flat.get(key)),
            *(show_value(own.get(key, flat.get(key))) for own in changes),
        )
        for key in keys
        if not key.startswith(_OWN_SETTINGS)
    ]
