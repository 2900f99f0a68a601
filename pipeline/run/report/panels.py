"""Which curves a report shows: charts of the metrics that a run has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.evaluate.summary import ACCURACY, mean_of, metric_title
from pipeline.run.report.curves import Panel, Points, Scale, Series, lines
from pipeline.run.report.run_records import Row, RunRecords

_CHARTS: Sequence[tuple[Panel, Mapping[str, str]]] = (
    (Panel("Loss of demonstrations"), {"loss": "sft/loss"}),
    (Panel("Entropy, nats a token"), {"entropy": "rollout/entropy"}),
    (
        Panel("Right and well-formed rollouts", scale="percent"),
        {"right": "rollout/correct_share", "well formed": "rollout/well_formed_share"},
    ),
    (Panel("KL to the reference"), {"KL": "learner/kl"}),
    (
        Panel(
            "Groups by signal",
            stacked=True,
            note="Only groups with different rewards give a gradient.",
        ),
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
        Panel("How completions end", scale="percent", stacked=True),
        {
            "by themselves": "rollout/stop/eos",
            "stop string": "rollout/stop/stop_string",
            "cut off at the limit": "rollout/stop/length",
        },
    ),
    (Panel("Repetition", scale="percent"), {"repeated share": "rollout/repetition"}),
    (Panel("Gradient norm"), {"gradient norm": "learner/grad_norm"}),
    (Panel("Loss"), {"loss": "learner/loss"}),
    (Panel("Learning rate", smoothed=False), {"learning rate": "learner/lr"}),
    (Panel("Norm of the adapter", smoothed=False), {"adapter": "learner/adapter_norm"}),
    (
        Panel("Sampler and learner: difference of log-probs"),
        {"99.9th percentile": "learner/mismatch_p999", "mean": "learner/mismatch_mean"},
    ),
    (
        Panel("Clipped tokens", scale="percent"),
        {"below": "learner/clip_low", "above": "learner/clip_high"},
    ),
    (Panel("Largest ratio of a token"), {"ratio": "learner/ratio_max"}),
    (Panel("Importance weight, mean"), {"weight": "learner/importance_weight"}),
    (Panel("Spread of the advantages"), {"standard deviation": "advantage/std"}),
    (
        Panel("Seconds of a step", stacked=True),
        {
            "rollouts": "time/sample_s",
            "rewards": "time/reward_s",
            "update": "time/learn_s",
            "sync": "time/sync_s",
        },
    ),
    (
        Panel("Tokens a second"),
        {
            "generated": "speed/generated_tokens_per_s",
            "trained": "speed/trained_tokens_per_s",
        },
    ),
    (Panel("Goodput", scale="percent"), {"total": "goodput/total"}),
    (Panel("Slots in use", scale="percent"), {"useful": "rollout/slots_useful"}),
)
"""Charts of metrics of the steps, by the labels of their lines."""


def panels(run: RunRecords) -> Iterator[Panel]:
    """The charts of a run, the most important first; metrics that the run lacks are left out."""
    reward = Panel("Reward")
    parts = Panel("Rewards by part", note="Before their weights.")
    memory = Panel("Device memory, GiB", smoothed=False)
    found = [
        _evaluations(run),
        _with_metrics(run, reward, {"mean reward": "reward/mean"}),
        _with_metrics(run, parts, {part: f"reward/{part}" for part in run.parts}),
        _lengths(run),
        *(_with_metrics(run, panel, metrics) for panel, metrics in _CHARTS),
        _with_metrics(run, memory, _memory_metrics(run)),
    ]
    yield from (panel for panel in found if panel.series)


def _with_metrics(run: RunRecords, panel: Panel, metrics: Mapping[str, str]) -> Panel:
    """The chart with the lines whose metric the run has."""
    known = {label: run.values(metric) for label, metric in metrics.items()}
    return replace(panel, series=lines(_aligned(known) if panel.stacked else known))


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
    return Series(label, points, colour, measured=True)


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
        return Panel("Evaluation")
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
