"""The report of a run as one HTML page that loads nothing else."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from configs.toml_text import show_value
from pipeline.run.goodput import GROUPS, LOST, grouped, phase_seconds, share_rows
from pipeline.run.history import RESUMED, SETTINGS_CHANGED
from pipeline.run.report import facts
from pipeline.run.report.curves import Panel, Series, chart
from pipeline.run.report.panels import panels
from pipeline.run.report.run_records import RunRecords
from pipeline.run.report.samples import answer_rows, rollout_rows
from pipeline.run.report.verdict import verdict

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that HTML cannot hold."""
_TIME_COLOURS = {
    "rollouts": 0,
    "update": 1,
    "rewards": 2,
    "evaluation, records": 4,
    "start": 5,
    LOST: 6,
}
_MINUTE_S, _HOUR_S = 60.0, 3600.0


def run_page(run: RunRecords) -> str:
    """The report of a run."""
    judged, changed = verdict(run), run.entries(SETTINGS_CHANGED)
    resumes, changes = marks(run)
    curves = [(one, chart(one, resumes=resumes, changes=changes)) for one in panels(run)]
    sections = {
        "Problems": judged.problems,
        "Curves": curves,
        "Time": share_rows(run.time_use.seconds),
        "Answers to the same prompts": answer_rows(run),
        "Rollouts": rollout_rows(run),
        "Alarms, faults, resumes": facts.events(run),
        "Plan and reality": list(facts.plan_figures(run)),
        "Settings": run.config,
    }
    return render(
        "run.html",
        title=f"{run.name}: report",
        run=run,
        state=facts.state(run),
        verdict=judged,
        key_figures=list(facts.key_figures(run)),
        sections={title: content for title, content in sections.items() if content},
        resumes=resumes,
        changes=[
            f"{key} = {show_value(value)}" for one in changed for key, _, value in one["changes"]
        ],
        time_curve=[(one, chart(one)) for one in _time_panels(run)],
        devices=share_rows(run.time_use.devices),
        settings=facts.settings(run),
    )


def marks(run: RunRecords) -> tuple[list[float], list[float]]:
    """Where on the axis of steps the run was resumed, and where a resume changed settings."""
    resumes = [one["step"] + 0.5 for one in run.journal if one["event"] == RESUMED and one["step"]]
    return resumes, [one["after_step"] + 0.5 for one in run.entries(SETTINGS_CHANGED)]


def render(template: str, **values: Any) -> str:
    """Renders a template of `templates/`; all values but charts are escaped."""
    environment = Environment(
        loader=PackageLoader("pipeline.run.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(values)
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", page)


def _time_panels(run: RunRecords) -> list[Panel]:
    """What the time of the steps was used for; none without any."""
    use = run.time_use
    unit, unit_s = ("hours", _HOUR_S) if use.wall_s > 3 * _HOUR_S else ("minutes", _MINUTE_S)
    points: dict[str, list[tuple[float, ...]]] = {group: [] for group in GROUPS}
    until_s = 0.0
    for row in use.rows:
        seconds = phase_seconds(row)
        total_s = sum(seconds.values())
        at_s, until_s = until_s, until_s + total_s
        for group, value in grouped(seconds).items():
            share = value / total_s if total_s else 0.0
            points[group] += [(at_s / unit_s, share), (until_s / unit_s, share)]
    series = [
        Series(group, found, _TIME_COLOURS[group])
        for group, found in points.items()
        if any(share for _, share in found)
    ]
    title, x = "What the run waits for", f"{unit} of the run"
    return [Panel(title, series, "percent", stacked=True, x=x)] if series else []
