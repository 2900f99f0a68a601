"""The report of a run as one HTML page that loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report import facts
from pipeline.report.curves import Panel, Span, chart, share_styles, time_chart
from pipeline.report.panels import panels
from pipeline.report.run_records import RunRecords
from pipeline.report.samples import Table, answer_table, rollout_table
from pipeline.report.time_use import GROUPS, WAITING, grouped
from pipeline.report.verdict import verdict
from pipeline.run.ledger import DRIVER, ROWS, by_kind

MOST_SPANS = 60
"""Spans of the chart of time; more rows of the ledger are added up."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that HTML cannot hold."""
_GREY, _RED = 7, 6
_TIME_COLOURS = {
    "rollouts": 0,
    "update": 1,
    "rewards": 2,
    "idle slots, padding": 3,
    "evaluation, records": 4,
    "start": 5,
    "lost": _RED,
    WAITING: _GREY,
}
_FATE_COLOURS = {"trained": 2, "evaluation": 0, "no_signal": _GREY, "failed_reward": _RED}
_OTHER_FATES = (3, 1, 4, 5, 6)
_MINUTE_S, _HOUR_S = 60.0, 3600.0
_SHOWN_S = 0.05
"""Fewer seconds are not shown."""
_TITLES = {
    "problems": "Problems",
    "curves": "Curves",
    "time": "Time",
    "tokens": "Fate of the generated tokens",
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
        "tokens": _tokens(run),
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
        return bool(section.rows or section.problems)
    if isinstance(section, Mapping):
        return bool(section["rows"])
    return bool(section[0] if isinstance(section, tuple) else section)


def render(template: str, **values: Any) -> str:
    """Renders a template of `templates/`; all values but drawn charts are escaped."""
    environment = Environment(
        loader=PackageLoader("pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = _CONTROL.sub(
        "\N{REPLACEMENT CHARACTER}", environment.get_template(template).render(values)
    )
    return share_styles(page)


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
    """The ledger over time, and as a table by kind of process."""
    by_kind = facts.seconds_by_kind(run)
    kinds = list(by_kind)
    used = {name for rows in by_kind.values() for name, value in rows.items() if value >= _SHOWN_S}
    totals = {kind: sum(seconds.values()) for kind, seconds in by_kind.items()}
    rows = [
        [name.replace("_", " "), *(_cell(by_kind[kind].get(name), totals[kind]) for kind in kinds)]
        for name in ROWS
        if name in used
    ]
    rows.append(["all", *(f"{totals[kind]:,.1f} s" for kind in kinds)])
    return {
        "charts": [
            _time_chart(run, "All processes' time, by use", name="ta", kinds=kinds),
            _time_chart(
                run, "The driver's time: what the run waits for", name="td", kinds=[DRIVER]
            ),
        ]
        if run.ledger and run.ledger[-1]["end"] > run.ledger[0]["start"]
        else [],
        "titles": ["row", *kinds],
        "rows": rows if by_kind else [],
        "numbers": tuple(range(1, len(kinds) + 1)),
    }


def _time_chart(run: RunRecords, title: str, *, name: str, kinds: Sequence[str]) -> dict[str, Any]:
    groups = [*GROUPS, WAITING]
    unit, divisor = "minutes", _MINUTE_S
    if run.ledger[-1]["end"] > 3 * _HOUR_S:
        unit, divisor = "hours", _HOUR_S
    spans = list(_spans(run, groups, kinds=kinds, divisor=divisor))
    used = [group for number, group in enumerate(groups) if any(s.values[number] for s in spans)]
    colours = [_TIME_COLOURS[group] for group in groups]
    svg = time_chart(spans, colours=colours, name=name, title=title, x=f"{unit} of the run")
    return {
        "title": title,
        "svg": Markup(svg),  # drawn here
        "key": [(group, _TIME_COLOURS[group]) for group in used],
    }


def _cell(seconds: float | None, total: float) -> str:
    return (
        ""
        if seconds is None or seconds < _SHOWN_S
        else f"{seconds:,.1f} s, {seconds / (total or 1):.1%}"
    )


def _spans(
    run: RunRecords, groups: Sequence[str], *, kinds: Sequence[str], divisor: float
) -> Iterator[Span]:
    """The rows of the ledger, neighbours added up; times are divided by `divisor`."""
    size = -(-len(run.ledger) // MOST_SPANS)
    for start in range(0, len(run.ledger), size):
        chunk = run.ledger[start : start + size]
        sums = dict.fromkeys(groups, 0.0)
        for kind, seconds in by_kind(row["seconds"] for row in chunk).items():
            if kind in kinds:
                for group, value in grouped(kind, seconds).items():
                    sums[group] += value
        yield Span(chunk[0]["start"] / divisor, chunk[-1]["end"] / divisor, list(sums.values()))


def _tokens(run: RunRecords) -> Mapping[str, Any]:
    """What became of the generated tokens."""
    fates = facts.token_fates(run)
    total = sum(fates.values())
    others = iter(_OTHER_FATES)
    colours = {fate: _FATE_COLOURS.get(fate) for fate in fates}
    chosen = {
        fate: next(others, _GREY) if colour is None else colour for fate, colour in colours.items()
    }
    names = {fate: fate.replace("_", " ") for fate in fates}
    return {
        "bar": [(100 * count / total, chosen[fate]) for fate, count in fates.items()],
        "key": [(names[fate], chosen[fate]) for fate in fates],
        "rows": [
            (names[fate], f"{count:,.0f}", f"{count / total:.1%}") for fate, count in fates.items()
        ],
    }
