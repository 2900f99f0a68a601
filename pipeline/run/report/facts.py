"""The tables of a run's report: key figures, plan against reality, events, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from configs.resume import diff_configs
from configs.settings import find_setting
from configs.toml_text import show_value
from pipeline.deadline import show_duration
from pipeline.evaluate.summary import show_interval, show_mean
from pipeline.run.history import ENDED, RESTARTED, RESUMED
from pipeline.run.report.run_records import RunRecords
from pipeline.run.status import phase_words

_EVENTS = frozenset(
    {
        "alarm", "failed", "update_skipped", "reward_errors", "evaluation_errors",
        "code_changed", "hardware_changed", "forked", "sizes_reduced",
        "abandoned", "refused",
        "waited_for_devices", "rewards_changed", "extended", "budget",
        "settings_changed",
        RESTARTED, RESUMED, ENDED,
    }
)  # fmt: skip
_NO_FACTS = ("time", "event", "step", "after_step")
_SIZE_OF_TEXT = 300


def state(run: RunRecords) -> tuple[str, str]:
    """A word for the state of the run, and a sentence."""
    if run.running:
        phase = phase_words(run.status.get("phase", ""))
        return "running", f"A process holds the folder{f'; it is {phase}' if phase else ''}."
    if run.summary:
        word = str(run.summary["ended"])
        return word, "The run ended by itself." if word == "finished" else f"The run was {word}."
    if run.failure is not None:
        return "failed", "With the cause corrected, the same command continues from the checkpoint."
    killed = "No process holds the folder, and no end is recorded: it was killed."
    return "not ended", f"{killed} The same command continues from the last checkpoint."


def key_figures(run: RunRecords) -> Iterator[tuple[str, str, str]]:
    """What to look at first: name, value and a remark; what is not known is left out."""
    planned = run.steps_planned
    yield "steps", f"{run.steps:,}", f"of {planned:,}" if planned else ""
    for name in ("test before", "test after"):
        for found in run.evaluations(name.replace(" ", "_"))[-1:]:
            yield name, show_mean(found), show_interval(found)
    if (best := run.best_validation) is not None:
        yield "best validation", show_mean(best), f"after step {best['step']}"
    generated = sum(count for _, count in run.values("tokens/generated"))
    wall_s = run.summary.get("wall_s", run.last_row.get("time/elapsed_s"))
    tokens = run.summary.get("tokens_generated", generated)
    use, speeds = run.time_use, run.time_use.speeds
    steps_s = [seconds for _, seconds in run.values("time/step_s")]
    known = (
        ("time", wall_s, show_duration, "device waits not counted"),
        ("first step done", use.first_step_s, show_duration, "all waits counted"),
        ("a step", median(steps_s) if steps_s else None, "{:.3g} s".format, "median"),
        ("tokens generated", tokens, "{:,.0f}".format, "for training, each step once"),
        ("goodput", use.goodput.get("total"), "{:.0%}".format, "of all time"),
        ("speed", speeds.get("generated_tokens_per_s"), "{:,.0f} tokens/s".format, "mean"),
        ("MFU of updates", speeds.get("mfu"), "{:.1%}".format, "mean, 4 N operations a token"),
        ("cost", cost(run).get("usd"), "${:,.2f}".format, "of all chips"),
    )
    for name, value, shown, remark in known:
        if value:
            yield name, shown(value), remark


def cost(run: RunRecords) -> Mapping[str, float]:
    """Dollars of the run, as far as a price is known: the summary's, else the last step's."""
    last = {name: value for name, value in run.last_row.items() if name.startswith("cost/")}
    return run.summary.get("cost") or {name[len("cost/") :]: last[name] for name in last}


def plan_figures(run: RunRecords) -> Iterator[tuple[str, str, str, str]]:
    """Planned beside measured: name, planned, measured, remark."""
    planned = run.values("budget/steps_planned")
    if planned:
        yield "steps", f"{planned[0][1]:,.0f}", f"{run.steps:,}", "planned after the first step"
    row, suffix = run.last_row, "/planned_gib"
    for process in (name.removesuffix(suffix) for name in row if name.endswith(suffix)):
        peak, compiled = (row.get(f"{process}/{kind}_gib") for kind in ("peak", "compiled"))
        yield (
            f"GiB of {process.removeprefix('hbm/').replace('_', ' ')}",
            f"{row[f'{process}{suffix}']:.3g}",
            "not known" if peak is None else f"{peak:.3g}",
            "" if compiled is None else f"compiled {compiled:.3g}",
        )
    for key, size in run.plan.get("sizes", {}).items():
        given = run.setting(f"plan.{key}")
        yield f"plan.{key}", "not set" if given is None else f"{given:,}", f"{size:,}", "used"


def readable_time(stamp: str) -> str:
    """A time stamp of a record, in UTC, that breaks between date and time."""
    return stamp.replace("T", " ").removesuffix("Z")


def events(run: RunRecords) -> list[tuple[str, str, str, str]]:
    """Alarms, faults, resumes and changed decisions: time, step, event, facts."""
    return [_event(entry) for entry in run.journal if entry["event"] in _EVENTS]


def _event(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if entry["event"] == ENDED:
        text = f"as {entry['ended']}"
    elif "changes" in entry:
        changes = ([key, *map(show_value, values)] for key, *values in entry["changes"])
        text = "; ".join(f"{key} was {old}, now {new}" for key, old, new in changes)
    else:
        facts = {key: value for key, value in entry.items() if key not in _NO_FACTS}
        known = {key: value for key, value in facts.items() if value not in (None, "", [], {})}
        shown = map(_show_fact, known.values())
        names = (key.replace("_", " ") for key in known)
        text = ", ".join(f"{name} {value}" for name, value in zip(names, shown, strict=True))
    step = str(entry.get("step", entry.get("after_step", "")))
    cut = text if len(text) <= _SIZE_OF_TEXT else f"{text[:_SIZE_OF_TEXT]} ..."
    return readable_time(entry.get("time", "")), step, entry["event"].replace("_", " "), cut


def _show_fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else show_value(value)


def settings(run: RunRecords) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """The settings that differ from their defaults, with these, and the others."""
    changed, others = [], []
    for key, _, value in diff_configs({}, run.config):
        setting, shown = find_setting(key.split(".")), show_value(value)
        if setting is None or setting.required:
            changed.append((key, shown, ""))
        elif setting.default == value:
            others.append((key, shown))
        else:
            has_default = setting.default is not None or setting.optional
            changed.append((key, shown, show_value(setting.default) if has_default else ""))
    return changed, others
