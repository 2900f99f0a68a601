"""Which curves a report shows: of one run, or of several with a line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.evaluate.summary import ACCURACY, mean_of, metric_title
from pipeline.run.report.curves import COLOURS, Panel, Series, lines
from pipeline.run.report.run_records import Row, RunRecords

_CHARTS: Sequence[tuple[Panel, Mapping[str, str]]] = (
    (Panel("Reward"), {"mean reward": "reward/mean"}),
    (Panel("Loss of demonstrations"), {"loss": "sft/loss"}),
    (
        Panel("Length of completions, tokens"),
        {
            "mean": "rollout/tokens_mean",
            "5%": "rollout/tokens_q05",
            "95%": "rollout/tokens_q95",
            "right": "rollout/tokens_right",
            "wrong": "rollout/tokens_wrong",
        },
    ),
    (Panel("Entropy, nats a token"), {"entropy": "rollout/entropy"}),
    (
        Panel("Right and well-formed rollouts", percent=True),
        {"right": "rollout/correct_share", "well formed": "rollout/well_formed_share"},
    ),
    (Panel("KL to the reference"), {"KL": "learner/kl"}),
    (
        Panel("Groups by signal", note="Only groups with different rewards give a gradient."),
        {
            "different rewards": "groups/mixed",
            "equal rewards": "groups/all_equal",
            "too few rewards": "groups/short",
        },
    ),
    (
        Panel("Groups with one kind of answer", note="Prompts that are too easy, and too hard."),
        {"all right": "groups/all_right", "all wrong": "groups/all_wrong"},
    ),
    (
        Panel("How completions end", percent=True),
        {
            "by themselves": "rollout/stop/eos",
            "stop string": "rollout/stop/stop_string",
            "cut off at the limit": "rollout/stop/length",
        },
    ),
    (Panel("Loss"), {"loss": "learner/loss"}),
    (Panel("Gradient norm"), {"gradient norm": "learner/grad_norm"}),
    (
        Panel("Sampler and learner: difference of log-probs"),
        {"99.9th percentile": "learner/mismatch_p999", "mean": "learner/mismatch_mean"},
    ),
    (
        Panel("Seconds of a step"),
        {
            "rollouts": "time/sample_s",
            "rewards": "time/reward_s",
            "update": "time/learn_s",
            "sync": "time/sync_s",
        },
    ),
    (Panel("Goodput", percent=True), {"total": "goodput/total"}),
)
"""Charts of metrics of the steps, by the labels of their lines."""


def panels(run: RunRecords) -> Iterator[Panel]:
    """The charts of a run, the most important first; metrics that the run lacks are left out."""
    tests = [*run.evaluations("test_before"), *run.evaluations("test_after")]
    parts = Panel("Rewards by part", note="Before their weights.")
    found = [
        _evaluations({"validation": run.evaluations("validation"), "test": tests}),
        _with_metrics(run, parts, {part: f"reward/{part}" for part in run.parts}),
        *(_with_metrics(run, panel, metrics) for panel, metrics in _CHARTS),
    ]
    yield from (panel for panel in found if panel.series)


def compared_panels(runs: Mapping[str, RunRecords]) -> Iterator[Panel]:
    """The charts of several runs by name: validations, and of each chart its first metric."""
    found = [_evaluations({name: run.evaluations("validation") for name, run in runs.items()})]
    for panel, metrics in _CHARTS:
        label, metric = next(iter(metrics.items()))
        title = panel.title if len(metrics) == 1 else f"{panel.title}: {label}"
        series = lines({name: run.values(metric) for name, run in runs.items()})
        found.append(replace(panel, title=title, series=series, note=""))
    yield from (panel for panel in found if panel.series)


def _with_metrics(run: RunRecords, panel: Panel, metrics: Mapping[str, str]) -> Panel:
    """The chart with the lines whose metric the run has."""
    return replace(panel, series=lines({label: run.values(one) for label, one in metrics.items()}))


def _evaluations(sets: Mapping[str, Sequence[Row]]) -> Panel:
    """Results of evaluations with their intervals."""
    series = [
        Series(label, [_measured(one) for one in rows], number % COLOURS, measured=True)
        for number, (label, rows) in enumerate(sets.items())
        if rows
    ]
    if not series:
        return Panel("Evaluation")
    first = next(rows for rows in sets.values() if rows)[0]
    return Panel(
        f"Evaluation: {metric_title(first).replace('_', ' ')}",
        series,
        ACCURACY in first,
        note="Bars are 95% intervals over the prompts.",
    )


def _measured(one: Row) -> tuple[float, ...]:
    mean = mean_of(one) or 0.0
    return (one["step"], mean, *(one["ci95"] or (mean, mean)))
