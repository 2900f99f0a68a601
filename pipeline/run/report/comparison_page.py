"""The comparison of several runs as one HTML page that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from configs.resume import diff_configs
from configs.toml_text import show_value
from pipeline.evaluate.summary import show_change
from pipeline.run.report import facts
from pipeline.run.report.curves import chart
from pipeline.run.report.panels import compared_panels
from pipeline.run.report.run_page import render
from pipeline.run.report.run_records import RunRecords, paired_change
from pipeline.run.report.verdict import verdict

_OWN_SETTINGS = ("run.", "wandb.")
"""Begins of settings that differ by nature."""


def comparison_page(runs: Sequence[RunRecords]) -> str:
    """The comparison; the first run is the one that the others are compared with."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    by_name = dict(zip(names, runs, strict=True))
    figures = [{name: value for name, value, _ in facts.key_figures(run)} for run in runs]
    wanted = dict.fromkeys(name for own in figures for name in own)
    return render(
        "comparison.html",
        title=f"{', '.join(names)}: comparison",
        names=names,
        verdicts=[(name, facts.state(run)[0], verdict(run)) for name, run in by_name.items()],
        figures=[(name, *(own.get(name, "") for own in figures)) for name in wanted],
        pairs=[_pair_row(runs[0], other) for other in runs[1:]],
        charts=[(panel, chart(panel)) for panel in compared_panels(by_name)],
        settings=_differing_settings(runs),
    )


def _pair_row(first: RunRecords, other: RunRecords) -> tuple[str, str, str, str, str]:
    """The last evaluation of both runs: change, p-value, prompts; or why there is none."""
    both = f"{other.name} against {first.name}"
    for name in ("test_after", "validation"):
        found = [run.evaluations(name)[-1:] for run in (first, other)]
        if not all(found):
            continue
        (one,), (another,) = found
        if one["metric"] != another["metric"]:
            why = f"{one['metric']} and {another['metric']} are different metrics"
            return both, name, why, "", ""
        change = paired_change(first, one, other, another)
        if change is None or change["paired_difference"] is None:
            why = "no prompt has a score in both" if change else "no prompt in common"
            return both, name, why, "", ""
        shown = show_change(change["before"], change["after"], change)
        counts = f"{change['gained']} gained, {change['lost']} lost of {change['after']['n']}"
        return both, name, shown, f"{change['paired_p']:.1e} ({change['paired_test']})", counts
    return both, "", "no evaluation that both have", "", ""


def _differing_settings(runs: Sequence[RunRecords]) -> list[tuple[str, ...]]:
    """Each setting that differs, with its value in each run."""
    flat = [{key: value for key, _, value in diff_configs({}, run.config)} for run in runs]
    keys = dict.fromkeys(key for own in flat for key in own if not key.startswith(_OWN_SETTINGS))
    rows = [(key, *(show_value(own.get(key)) for own in flat)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
