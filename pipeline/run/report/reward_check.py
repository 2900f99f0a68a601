"""The report on a trial of reward functions: probes, speeds and findings."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.rollout.scoring import SUM
from pipeline.tables import table
from rewards.base import NAME_SEPARATOR
from rewards.checks.findings import Finding, speeds
from rewards.checks.probes import REFERENCE
from rewards.checks.trial import Scored, Trial

Figures = Mapping[str, Any]


def check_figures(
    trial: Trial, findings: Sequence[Finding], *, rows: int, rollouts_per_step: int
) -> dict[str, Any]:
    """All figures of the report, as JSON.

    Args:
        trial: the scores.
        findings: from `rewards.checks.findings` and `rewards.checks.cases`.
        rows: number of rows of the dataset.
        rollouts_per_step: for the forecast.
    """
    names = dict.fromkeys(one.probe.name for one in trial.scored)
    speed = speeds(trial, rollouts_per_step=rollouts_per_step)
    return {
        "rows": rows,
        "completions": len(trial.scored),
        "has_references": any(one.probe.name == REFERENCE for one in trial.scored),
        "rollouts_per_step": rollouts_per_step,
        "parts": [
            {
                "name": part.name,
                "function": part.function,
                "form": trial.facts[part.name].kind,
                "weight": part.weight,
            }
            for part in trial.rewards.functions
        ],
        "probes": [
            _probe([one for one in trial.scored if one.probe.name == name]) for name in names
        ],
        "speed": {name: asdict(one) for name, one in speed.items()},
        "findings": [asdict(finding) for finding in findings],
        "passed": not any(finding.fails for finding in findings),
    }


def check_lines(figures: Figures) -> Iterator[str]:
    """The lines of the report."""
    yield (
        f"{figures['completions']} completions for {figures['rows']} rows of the training data; "
        "mean (lowest..highest)"
    )
    if not figures["has_references"]:
        yield (
            "the rows have no reference answers: what compares with them is left out; --cases FILE "
            "checks completions of yours"
        )
    yield ""
    columns = dict.fromkeys(name for probe in figures["probes"] for name in probe["columns"])
    rows = [["completion", "n", *columns, ""]]
    for probe in figures["probes"]:
        cells = [_cell(probe["columns"].get(name)) for name in columns]
        rows.append([probe["name"], f"{probe['n']}", *cells, probe["kind"]])
    yield from table(rows)
    if figures["speed"]:
        yield ""
        yield from table(list(_speed_rows(figures)))
    yield ""
    yield from finding_lines(figures["findings"])


def finding_lines(findings: Sequence[Figures]) -> Iterator[str]:
    """The findings with their advice, errors first."""
    if not findings:
        yield "nothing is wrong"
    for finding in findings:
        yield f"{'ERROR' if finding['fails'] else 'warning'}: {finding['what']}"
        yield from (f"    {example}" for example in finding["examples"])
        yield f"  {finding['advice']}"


def _speed_rows(figures: Figures) -> Iterator[list[str]]:
    yield ["seconds, one at a time", "p50", "p99", f"{figures['rollouts_per_step']} rollouts", ""]
    for name, speed in figures["speed"].items():
        seconds = [f"{speed['p50_s']:.4f}", f"{speed['p99_s']:.4f}", f"{speed['step_s']:.1f}"]
        yield [name, *seconds, f"{speed['parallel']} at a time"]


def _probe(own: Sequence[Scored]) -> dict[str, Any]:
    """The figures of one probe in all rows."""
    columns = dict[str, Any]()
    for name in own[0].outcomes:
        outcomes = [one.outcomes[name] for one in own]
        columns[name] = _distribution([outcome.value for outcome in outcomes]) | {
            "errors": sum(outcome.error is not None for outcome in outcomes)
        }
        for key in dict.fromkeys(key for outcome in outcomes for key in outcome.named):
            values = [outcome.named.get(key) for outcome in outcomes]
            columns[f"{name}{NAME_SEPARATOR}{key}"] = _distribution(values)
    columns[SUM] = _distribution([one.total for one in own])
    probe = own[0].probe
    return {
        "name": probe.name,
        "kind": probe.kind,
        "what": probe.what,
        "n": len(own),
        "columns": columns,
    }


def _distribution(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "min": None, "max": None, "errors": 0}
    return {"mean": statistics.fmean(known), "min": min(known), "max": max(known), "errors": 0}


def _cell(found: Figures | None) -> str:
    if found is None:
        return ""
    errors = f" {found['errors']} errors" if found["errors"] else ""
    if found["mean"] is None:
        return f"-{errors}"
    if found["min"] == found["max"]:
        return f"{found['mean']:.3g}{errors}"
    return f"{found['mean']:.3g} ({found['min']:.3g}..{found['max']:.3g}){errors}"
