"""The report of a run as one HTML page that loads nothing else."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.run.goodput import share_rows
from pipeline.run.history import RESUMED
from pipeline.run.report import facts
from pipeline.run.report.curves import chart
from pipeline.run.report.panels import panels
from pipeline.run.report.run_records import RunRecords
from pipeline.run.report.samples import answer_rows, rollout_rows
from pipeline.run.report.verdict import verdict


def run_page(run: RunRecords) -> str:
    """The report of a run."""
    judged = verdict(run)
    resumes = [one["step"] + 0.5 for one in run.journal if one["event"] == RESUMED and one["step"]]
    curves = [(one, chart(one, resumes=resumes)) for one in panels(run)]
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
        devices=share_rows(run.time_use.devices),
        settings=facts.settings(run),
    )


def render(template: str, **values: Any) -> str:
    """Renders a template of `templates/`; all values but charts are escaped."""
    environment = Environment(
        loader=PackageLoader("pipeline.run.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)
