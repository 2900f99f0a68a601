"""The comparison of several runs as one HTML page that loads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.deadline import show_duration
from pipeline.evaluate.summary import ACCURACY, metric_title, show_change
from pipeline.run.report import facts
from pipeline.run.report.comparison import Pair, differing_settings, pairs, reached, targets
from pipeline.run.report.curves import COLOURS, Panel, Scale, Series
from pipeline.run.report.panels import evaluation_series
from pipeline.run.report.run_page import drawn, render
from pipeline.run.report.run_records import RunRecords
from pipeline.run.report.verdict import verdict

_OVERLAID: tuple[tuple[str, str, Scale], ...] = (
    ("Mean reward", "reward/mean", "linear"),
    ("Entropy, nats a token", "rollout/entropy", "linear"),
    ("KL to the reference", "learner/kl", "linear"),
    ("Mean length of completions, tokens", "rollout/tokens_mean", "linear"),
    ("Groups with different rewards", "groups/mixed", "linear"),
    ("Gradient norm", "learner/grad_norm", "linear"),
    ("Seconds of a step", "time/step_s", "linear"),
    ("Goodput", "goodput/total", "percent"),
)
"""Title, metric and scale of the charts with a line for each run."""


def comparison_page(runs: Sequence[RunRecords]) -> str:
    """The comparison; the first run is the one that the others are compared with."""
    names = unique_names(runs)
    verdicts = [verdict(run) for run in runs]
    figures = [{name: value for name, value, _ in facts.key_figures(run)} for run in runs]
    wanted = dict.fromkeys(name for own in figures for name in own)
    return render(
        "comparison.html",
        title=f"{', '.join(names)}: comparison",
        names=names,
        runs=runs,
        key=[(name, number % COLOURS) for number, name in enumerate(names)],
        verdicts=verdicts,
        states=[facts.state(run)[0] for run in runs],
        figures=[(name, *(own.get(name, "") for own in figures)) for name in wanted],
        pairs=[_pair_row(one) for one in pairs(runs)],
        charts=drawn(list(_panels(runs, names)), name="c"),
        prices=list(_prices(runs)),
        settings=differing_settings(runs),
    )


def unique_names(runs: Sequence[RunRecords]) -> list[str]:
    """The runs' names, or their paths where names are equal."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _pair_row(pair: Pair) -> tuple[str, str, str, str, str]:
    both = f"{pair.second} against {pair.first}"
    change = pair.change
    if change is None or change["paired_difference"] is None:
        return both, pair.evaluation, pair.why or "no prompt has a score in both", "", ""
    shown = show_change(change["before"], change["after"], change)
    counts = f"{change['gained']} gained, {change['lost']} lost"
    p = f"{change['paired_p']:.1e} ({change['paired_test']})"
    return both, pair.evaluation, shown, p, f"{counts} of {change['after']['n']}"


def _panels(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[Panel]:
    found = [run.evaluations("validation") for run in runs]
    series = [
        evaluation_series(rows, label=name, colour=number % COLOURS)
        for number, (name, rows) in enumerate(zip(names, found, strict=True))
        if rows
    ]
    if series:
        first = next(rows for rows in found if rows)[0]
        scale: Scale = "percent" if ACCURACY in first else "linear"
        yield Panel(f"Validation: {metric_title(first)}", series, scale)
    for title, metric, scale in _OVERLAID:
        lines = [
            Series(name, run.values(metric), colour=number % COLOURS)
            for number, (name, run) in enumerate(zip(names, runs, strict=True))
            if run.values(metric)
        ]
        if lines:
            yield Panel(title, lines, scale)


def _prices(runs: Sequence[RunRecords]) -> Iterator[tuple[str, ...]]:
    """For each target a cell for each run."""
    exact = all(ACCURACY in one for run in runs for one in run.evaluations("validation")[:1])
    for target in targets(runs):
        cells = []
        for run in runs:
            found = reached(run, target)
            if found.step is None:
                cells.append("not reached")
                continue
            parts = [f"step {found.step}"]
            parts += [] if found.seconds is None else [show_duration(found.seconds)]
            parts += [] if found.tokens is None else [f"{found.tokens:,.0f} tokens"]
            parts += [] if found.usd is None else [f"${found.usd:,.2f}"]
            cells.append(", ".join(parts))
        yield f"{target:.1%}" if exact else f"{target:.3g}", *cells
