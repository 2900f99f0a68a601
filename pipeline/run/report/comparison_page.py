"""The comparison of several runs as one HTML page that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from configs.resume import diff_configs
from configs.toml_text import show_value
from pipeline.evaluate.summary import metric_title, show_change
from pipeline.run.report import facts
from pipeline.run.report.curves import COLOURS, Panel, chart, lines
from pipeline.run.report.panels import evaluation_scale, evaluation_series
from pipeline.run.report.run_page import render
from pipeline.run.report.run_records import RunRecords, paired_change
from pipeline.run.report.verdict import verdict

_OVERLAID: Sequence[tuple[Panel, str]] = (
    (Panel("Mean reward"), "reward/mean"),
    (Panel("Entropy, nats a token"), "rollout/entropy"),
    (Panel("KL to the reference"), "learner/kl"),
    (Panel("Mean length of completions, tokens"), "rollout/tokens_mean"),
    (Panel("Groups with different rewards"), "groups/mixed"),
    (Panel("Gradient norm"), "learner/grad_norm"),
    (Panel("Seconds of a step"), "time/step_s"),
    (Panel("Goodput", scale="percent"), "goodput/total"),
)
"""Charts with a line for each run, and their metric."""
_OWN_SETTINGS = ("run.", "wandb.")
"""Begins of settings that differ by nature."""


def comparison_page(runs: Sequence[RunRecords]) -> str:
    """The comparison; the first run is the one that the others are compared with."""
    names = _unique_names(runs)
    figures = [{name: value for name, value, _ in facts.key_figures(run)} for run in runs]
    wanted = dict.fromkeys(name for own in figures for name in own)
    return render(
        "comparison.html",
        title=f"{', '.join(names)}: comparison",
        names=names,
        verdicts=[
            (name, facts.state(run)[0], verdict(run)) for name, run in zip(names, runs, strict=True)
        ],
        figures=[(name, *(own.get(name, "") for own in figures)) for name in wanted],
        pairs=[_pair_row(runs[0], other) for other in runs[1:]],
        charts=[(panel, chart(panel)) for panel in _panels(runs, names)],
        settings=_differing_settings(runs),
    )


def _unique_names(runs: Sequence[RunRecords]) -> list[str]:
    """The runs' names, or their paths where names are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


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


def _panels(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[Panel]:
    found = [run.evaluations("validation") for run in runs]
    series = [
        evaluation_series(rows, label=name, colour=number % COLOURS)
        for number, (name, rows) in enumerate(zip(names, found, strict=True))
        if rows
    ]
    if series:
        first = next(rows for rows in found if rows)[0]
        yield Panel(f"Validation: {metric_title(first)}", series, evaluation_scale(first))
    for panel, metric in _OVERLAID:
        by_run = {name: run.values(metric) for name, run in zip(names, runs, strict=True)}
        if series := lines(by_run):
            yield replace(panel, series=series)
