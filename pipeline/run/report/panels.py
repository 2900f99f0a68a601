"""Which curves a report shows: charts of the metrics that a run has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.evaluate.summary import ACCURACY, mean_of, metric_title
from pipeline.run.report.curves import Panel, Points, Scale, Series, lines
from pipeline.run.report.run_records import Row, RunRecords


@dataclass(frozen=True)
class Chart:
    """A chart of metrics of the steps.

    Attributes:
        title: what it shows.
        metrics: by the labels of their lines; those that the run lacks are left out.
        scale: of the y axis.
        stacked: whether the metrics add up.
        form: of the lines.
        note: below the chart.
    """

    title: str
    metrics: Mapping[str, str]
    scale: Scale = "linear"
    stacked: bool = False
    form: Literal["smoothed", "plain"] = "smoothed"
    note: str = ""


_CHARTS = (
    Chart("Loss of demonstrations", {"loss": "sft/loss"}),
    Chart("Entropy, nats a token", {"entropy": "rollout/entropy"}),
    Chart(
        "Right and well-formed rollouts",
        {"right": "rollout/correct_share", "well formed": "rollout/well_formed_share"},
        scale="percent",
    ),
    Chart("KL to the reference", {"KL": "learner/kl"}),
    Chart(
        "Groups by signal",
        {
            "different rewards": "groups/mixed",
            "equal rewards": "groups/all_equal",
            "too few rewards": "groups/short",
        },
        stacked=True,
        note="Only groups with different rewards give a gradient.",
    ),
    Chart(
        "Groups with one kind of answer",
        {"all right": "groups/all_right", "all wrong": "groups/all_wrong"},
        note="Prompts that are too easy, and too hard.",
    ),
    Chart(
        "How completions end",
        {
            "by themselves": "rollout/stop/eos",
            "stop string": "rollout/stop/stop_string",
            "cut off at the limit": "rollout/stop/length",
        },
        scale="percent",
        stacked=True,
    ),
    Chart("Repetition", {"repeated share": "rollout/repetition"}, scale="percent"),
    Chart("Gradient norm", {"gradient norm": "learner/grad_norm"}),
    Chart("Loss", {"loss": "learner/loss"}),
    Chart("Learning rate", {"learning rate": "learner/lr"}, form="plain"),
    Chart("Norm of the adapter", {"adapter": "learner/adapter_norm"}, form="plain"),
    Chart(
        "Sampler and learner: difference of log-probs",
        {"99.9th percentile": "learner/mismatch_p999", "mean": "learner/mismatch_mean"},
    ),
    Chart(
        "Clipped tokens",
        {"below": "learner/clip_low", "above": "learner/clip_high"},
        scale="percent",
    ),
    Chart("Largest ratio of a token", {"ratio": "learner/ratio_max"}),
    Chart("Importance weight, mean", {"weight": "learner/importance_weight"}),
    Chart("Spread of the advantages", {"standard deviation": "advantage/std"}),
    Chart(
        "Seconds of a step",
        {
            "rollouts": "time/sample_s",
            "rewards": "time/reward_s",
            "update": "time/learn_s",
            "sync": "time/sync_s",
        },
        stacked=True,
    ),
    Chart(
        "Tokens a second",
        {
            "generated": "speed/generated_tokens_per_s",
            "trained": "speed/trained_tokens_per_s",
        },
    ),
    Chart("Goodput", {"total": "goodput/total"}, scale="percent"),
    Chart("Slots in use", {"useful": "rollout/slots_useful"}, scale="percent"),
)


def panels(run: RunRecords) -> Iterator[Panel]:
    """The charts of a run, the most important first."""
    found = [
        _evaluations(run),
        of_metrics(
            run,
            Chart(
                "Reward",
                {"mean reward": "reward/mean"},
                note="Band: 95% interval of the moving mean over the steps.",
            ),
        ),
        of_metrics(
            run,
            Chart(
                "Rewards by part",
                {part: f"reward/{part}" for part in run.parts},
                note="Before their weights.",
            ),
        ),
        _lengths(run),
        *(of_metrics(run, one) for one in _CHARTS),
        of_metrics(run, Chart("Device memory, GiB", _memory_metrics(run), form="plain")),
    ]
    yield from (panel for panel in found if panel.series)


def of_metrics(run: RunRecords, chart: Chart) -> Panel:
    """A chart with the lines whose metric the run has."""
    known = {label: run.values(metric) for label, metric in chart.metrics.items()}
    if chart.stacked:
        known = _aligned(known)
    series = lines(known, form=chart.form)
    return Panel(chart.title, series, chart.scale, chart.stacked, note=chart.note)


def _aligned(known: Mapping[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Points at all steps, without metrics that are 0 everywhere."""
    rows = {
        label: dict(points) for label, points in known.items() if any(value for _, value in points)
    }
    steps = sorted({step for row in rows.values() for step in row})
    return {label: [(step, row.get(step, 0.0)) for step in steps] for label, row in rows.items()}


def evaluation_series(found: Sequence[Row], *, label: str, colour: int) -> Series:
    """Results of an evaluation with their intervals."""
    points = []
    for one in found:
        mean = mean_of(one) or 0.0
        points.append((one["step"], mean, *(one["ci95"] or (mean, mean))))
    return Series(label, points, colour, form="measured")


def evaluation_scale(one: Row) -> Scale:
    """The scale of a chart of such evaluations."""
    return "percent" if ACCURACY in one else "linear"


def _evaluations(run: RunRecords) -> Panel:
    sets = {
        "validation": run.evaluations("validation"),
        "test": [*run.evaluations("test_before"), *run.evaluations("test_after")],
    }
    found = {name: rows for name, rows in sets.items() if rows}
    if not found:
        return Panel("Evaluation", [])
    series = [
        evaluation_series(rows, label=name, colour=number)
        for number, (name, rows) in enumerate(found.items())
    ]
    first = next(iter(found.values()))[0]
    return Panel(
        f"Evaluation: {metric_title(first).replace('_', ' ')}",
        series,
        evaluation_scale(first),
        note="Bars are 95% intervals over the prompts.",
    )


def _lengths(run: RunRecords) -> Panel:
    low, middle, high = (run.values(f"rollout/tokens_{q}") for q in ("q05", "q50", "q95"))
    quantiles = [
        (step, y, below, above)
        for (step, y), (_, below), (_, above) in zip(middle, low, high, strict=True)
    ]
    found: dict[str, Points] = {
        "median, 5% to 95%": quantiles,
        "right": run.values("rollout/tokens_right"),
        "wrong": run.values("rollout/tokens_wrong"),
    }
    cap = run.setting("rollout.max_new_tokens")
    note = "" if cap is None else f"Dashed: the limit, {cap} tokens."
    return Panel("Length of completions, tokens", lines(found), bound=cap, note=note)


def _memory_metrics(run: RunRecords) -> dict[str, str]:
    """Memory of each process with devices: planned, compiled, in use, its peak."""
    names = [name for row in run.metrics[-1:] for name in row if name.startswith("hbm/")]
    words = (name.removeprefix("hbm/").removesuffix("_gib") for name in names)
    labels = [one.replace("/", ", ").replace("_", " ") for one in words]
    return dict(zip(labels, names, strict=True))
