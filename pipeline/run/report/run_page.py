"""The report of a run as one HTML page that loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.run.goodput import GROUPS, LOST, Interval, grouped, share_rows, summed
from pipeline.run.report import facts
from pipeline.run.report.curves import Panel, Span, chart, time_chart
from pipeline.run.report.panels import panels
from pipeline.run.report.run_records import RunRecords
from pipeline.run.report.samples import Table, answer_table, rollout_table
from pipeline.run.report.verdict import verdict

MOST_SPANS = 60
"""Spans of the chart of time; more intervals are added up."""
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
_TITLES = {
    "problems": "Problems",
    "curves": "Curves",
    "time": "Time",
    "answers": "Answers to the same prompts",
    "rollouts": "Rollouts",
    "events": "Alarms, faults, resumes",
    "plan": "Plan and reality",
    "cost": "Cost",
    "settings": "Settings",
}
"""Titles of the sections."""


def run_page(run: RunRecords) -> str:
    """The report of a run."""
    judged = verdict(run)
    sections = {
        "problems": judged.problems,
        "curves": drawn(list(panels(run)), name="c"),
        "time": _time(run),
        "answers": answer_table(run),
        "rollouts": rollout_table(run),
        "events": facts.events(run),
        "plan": list(facts.plan_figures(run)),
        "cost": list(facts.cost_figures(run)),
        "settings": facts.settings(run),
    }
    return render(
        "run.html",
        title=f"{run.name}: report",
        run=run,
        state=facts.state(run),
        verdict=judged,
        key_figures=list(facts.key_figures(run)),
        titles=_TITLES,
        sections={name: one for name, one in sections.items() if _has_content(one)},
    )


def _has_content(section: Any) -> bool:
    """Whether a section has anything to show."""
    if isinstance(section, Table):
        return bool(section.rows)
    if isinstance(section, Mapping):
        return bool(section["rows"])
    return bool(section[0] if isinstance(section, tuple) else section)


def render(template: str, **values: Any) -> str:
    """Renders a template of `templates/`; all values but drawn charts are escaped."""
    environment = Environment(
        loader=PackageLoader("pipeline.run.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(values)
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", page)


def drawn(found: Sequence[Panel], *, name: str) -> list[dict[str, Any]]:
    """Panels with their charts and keys, as the templates take them.

    Args:
        found: the panels.
        name: begins the names of these charts; unique on the page.
    """
    return [
        {
            "panel": panel,
            "svg": Markup(chart(panel, name=f"{name}{number}")),  # drawn here
            "key": [(series.label, series.colour) for series in panel.series],
        }
        for number, panel in enumerate(found)
    ]


def _time(run: RunRecords) -> dict[str, Any]:
    """Where the time went: over time, and as tables of the driver and of the devices."""
    use = run.time_use
    step_s = use.step_s
    devices = [
        (name, f"{seconds:,.1f}", f"{seconds / step_s:.1%}")
        for name, seconds in use.devices.items()
        if seconds
    ]
    chart = {"charts": [_time_chart(run)]} if use.wall_s else {"charts": []}
    return {**chart, "rows": share_rows(use), "devices": devices}


def _time_chart(run: RunRecords) -> dict[str, Any]:
    title, unit, divisor = "What the run waits for", "minutes", _MINUTE_S
    if run.time_use.wall_s > 3 * _HOUR_S:
        unit, divisor = "hours", _HOUR_S
    spans = list(_spans(run.time_use.intervals, divisor=divisor))
    used = [group for number, group in enumerate(GROUPS) if any(s.values[number] for s in spans)]
    colours = [_TIME_COLOURS[group] for group in GROUPS]
    svg = time_chart(spans, colours=colours, name="t", title=title, x=f"{unit} of the run")
    return {
        "title": title,
        "svg": Markup(svg),  # drawn here
        "key": [(group, _TIME_COLOURS[group]) for group in used],
    }


def _spans(intervals: Sequence[Interval], *, divisor: float) -> Iterator[Span]:
    """The intervals, neighbours added up; times are divided by `divisor`."""
    size, at_s = -(-len(intervals) // MOST_SPANS), 0.0
    for first in range(0, len(intervals), size):
        seconds = summed(one.seconds for one in intervals[first : first + size])
        until_s = at_s + sum(seconds.values())
        yield Span(at_s / divisor, until_s / divisor, list(grouped(seconds).values()))
        at_s = until_s
