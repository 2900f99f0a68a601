"""Which curves a report shows: charts of the metrics that a run has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from configs.toml_text import show_value
from pipeline.evaluate.summary import ACCURACY, mean_of, metric_title
from pipeline.run.history import RESUMED, SETTINGS_CHANGED
from pipeline.run.report.curves import COLOURS, Panel, Scale, Series
from pipeline.run.report.run_records import Row, RunRecords


@dataclass(frozen=True)
class Chart:
    """A chart of metrics of the steps.

    Attributes:
        title: what it shows.
        lines: metrics by their label; those that the run lacks are left out.
        scale: of the y axis.
        stacked: whether the lines add up.
        note: below the chart.
        noisy: whether long lines are smoothed.
    """

    title: str
    lines: Mapping[str, str]
    scale: Scale = "linear"
    stacked: bool = False
    note: str = ""
    noisy: bool = True


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
    Chart("Learning rate", {"learning rate": "learner/lr"}, noisy=False),
    Chart("Norm of the adapter", {"adapter": "learner/adapter_norm"}, noisy=False),
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
    resumes = [entry["step"] + 0.5 for entry in run.journal if _is_resume(entry)]
    changed = run.entries(SETTINGS_CHANGED)
    validation = _evaluations(run)
    if validation.series:
        yield validation
    for one in (_reward(run), _parts(run), _lengths(run)):
        if one.series:
            yield _marked(one, resumes, changed)
    for chart in _CHARTS:
        panel = of_metrics(run, chart)
        if panel.series:
            yield _marked(panel, resumes, changed)
    if (memory := _memory(run)).series:
        yield memory


def of_metrics(run: RunRecords, chart: Chart) -> Panel:
    """A chart with the lines whose metric the run has."""
    known = {label: run.values(metric) for label, metric in chart.lines.items()}
    if chart.stacked:
        steps = sorted({step for points in known.values() for step, _ in points})
        rows = {
            label: dict(points)
            for label, points in known.items()
            if any(value for _, value in points)
        }
        known = {
            label: [(step, row.get(step, 0.0)) for step in steps] for label, row in rows.items()
        }
    series = [
        Series(label, points, colour=number % COLOURS, noisy=chart.noisy)
        for number, (label, points) in enumerate(known.items())
        if points
    ]
    return Panel(chart.title, series, chart.scale, chart.stacked, note=chart.note)


def evaluation_series(found: Sequence[Row], *, label: str, colour: int) -> Series:
    """Results of an evaluation with their intervals."""
    means = [mean_of(one) or 0.0 for one in found]
    bounds = [one["ci95"] or (mean, mean) for one, mean in zip(found, means, strict=True)]
    return Series(
        label,
        [(one["step"], mean) for one, mean in zip(found, means, strict=True)],
        [low for low, _ in bounds],
        [high for _, high in bounds],
        marked=True,
        colour=colour,
    )


def _evaluations(run: RunRecords) -> Panel:
    sets = {
        "validation": run.evaluations("validation"),
        "test": [*run.evaluations("test_before"), *run.evaluations("test_after")],
    }
    found = {name: rows for name, rows in sets.items() if rows}
    series = [
        evaluation_series(rows, label=name, colour=number)
        for number, (name, rows) in enumerate(found.items())
    ]
    first = next(iter(found.values()), [{"accuracy": None}])[0]
    scale: Scale = "percent" if ACCURACY in first else "linear"
    title = metric_title(first).replace("_", " ")
    return Panel(
        f"Evaluation: {title}", series, scale, note="Bars are 95% intervals over the prompts."
    )


def _reward(run: RunRecords) -> Panel:
    rewards = run.values("reward/mean")
    series = [Series("mean reward", rewards)] if rewards else []
    return Panel("Reward", series, note="Band: 95% interval of the moving mean over the steps.")


def _parts(run: RunRecords) -> Panel:
    known = {part: run.values(f"reward/{part}") for part in run.parts}
    series = [
        Series(part, points, colour=number % COLOURS)
        for number, (part, points) in enumerate(known.items())
        if points
    ]
    return Panel("Rewards by part", series, note="Before their weights.")


def _lengths(run: RunRecords) -> Panel:
    cap = run.setting("rollout.max_new_tokens")
    bounds = [] if cap is None else [float(cap)]
    middle = run.values("rollout/tokens_q50")
    note = "" if cap is None else f"Dashed: the limit, {cap} tokens."
    if not middle:
        return Panel("Length of completions, tokens", [])
    low, high = (dict(run.values(f"rollout/tokens_{q}")) for q in ("q05", "q95"))
    series = [
        Series(
            "median, 5% to 95%",
            middle,
            [low.get(step, value) for step, value in middle],
            [high.get(step, value) for step, value in middle],
        )
    ]
    by_answer = {"right": "rollout/tokens_right", "wrong": "rollout/tokens_wrong"}
    series += [
        Series(label, run.values(metric), colour=number)
        for number, (label, metric) in enumerate(by_answer.items(), start=1)
        if run.values(metric)
    ]
    return Panel("Length of completions, tokens", series, bounds=bounds, note=note)


def _memory(run: RunRecords) -> Panel:
    """Memory of each process with devices: planned, compiled, in use, its peak."""
    names = [name for row in run.metrics[-1:] for name in row if name.startswith("hbm/")]
    series = [
        Series(
            name.removeprefix("hbm/").removesuffix("_gib").replace("/", ", ").replace("_", " "),
            run.values(name),
            colour=number,
            noisy=False,
        )
        for number, name in enumerate(names[:COLOURS])
    ]
    return Panel("Device memory, GiB", series)


def _is_resume(entry: Row) -> bool:
    return entry["event"] == RESUMED and entry["step"] > 0


def _marked(panel: Panel, resumes: Sequence[float], changed: Sequence[Row]) -> Panel:
    """The panel with lines where the run was resumed, and where settings were changed."""
    notes = [panel.note] if panel.note else []
    if resumes:
        notes.append("Dotted: resumed.")
    changes = [key_and_values for entry in changed for key_and_values in entry["changes"]]
    if changes:
        what = ", ".join(f"{key} = {show_value(value)}" for key, _, value in changes)
        notes.append(f"Dash-dotted: changed by a resume, {what}.")
    at = sorted({entry["after_step"] + 0.5 for entry in changed})
    return replace(panel, resumes=resumes, changes=at, note=" ".join(notes))
