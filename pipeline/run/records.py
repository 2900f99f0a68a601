"""Records of a run: metrics, rollouts and events in the run folder, in W&B and on the console."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from configs.evaluation import WEIGHTED_SUM
from pipeline.alarms import Alarm
from pipeline.evaluate.summary import (
    mean_of,
    metric_title,
    prompts_of,
    show_change,
    show_interval,
    show_mean,
    show_number,
)
from pipeline.run.console import Console
from pipeline.run.history import rewards_version
from pipeline.run.mirror import Mirror
from pipeline.run.run_folder import RunFolder
from pipeline.run.tracking import Tracker
from pipeline.types import ShowProgress
from rewards.base import RewardError

_SOURCE_LINE = re.compile(r"\(([^()]+:\d+)\)$")
"""File and line at the end of an error's message."""


def evaluation_line(summary: Mapping[str, Any]) -> str:
    """The summary of an evaluation as a line."""
    several = f" x {summary['samples']} samples" if summary["samples"] > 1 else ""
    interval = f" {show_interval(summary)}" if summary["ci95"] else ""
    mean = f"{metric_title(summary)} {show_mean(summary)}{interval}"
    parts = [f"{mean} on {prompts_of(summary)} prompts{several}"]
    if share := summary.get("excluded"):
        parts.append(f"{share:.1%} excluded")
    names = [f"{kind}@{summary['samples']}" for kind in ("pass", "majority") if several]
    parts += [f"{name} {summary[name]:.1%}" for name in names if name in summary]
    parts.append(f"{summary['well_formed']:.1%} well formed")
    if "reward" in summary and summary["metric"] != WEIGHTED_SUM:  # then it is the mean
        parts.append(f"mean reward {show_number(summary['reward'])}")
    return ", ".join(parts)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite numbers, as they are recorded."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _evaluation_metrics(name: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation by their names in W&B."""
    return {
        f"eval/{name}/{key}": value for key, value in summary.items() if isinstance(value, float)
    }


class Records:
    """Writes records to run folder, W&B and console."""

    def __init__(
        self, folder: RunFolder, tracker: Tracker, console: Console, mirror: Mirror | None = None
    ) -> None:
        self.folder = folder
        self.tracker = tracker
        self.console = console
        self._mirror = mirror or Mirror(None)
        self._shown_errors: set[tuple[str, ...]] = set()
        self._best: Mapping[str, Any] | None = None

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        rollouts: str | None = None,
        trained: bool = True,
    ) -> None:
        """Records the metrics of a step, counted from 1, that are finite numbers.

        The file of its `rollouts` is there: W&B's thread reads it. A resume repeats a step that is
        not `trained`, and W&B keeps the first row of a step.
        """
        metrics = finite(metrics)
        self.folder.write_metrics({"step": step, **metrics})
        if trained:
            self.tracker.log(metrics, step=step, rollouts=rollouts)
        self.console.step(step, metrics)

    def reward_errors(self, step: int, errors: Mapping[str, Sequence[RewardError]]) -> None:
        """Journals the errors of each part by cause; shows the first of each kind.

        Errors are of one kind if part, cause and source line are equal: messages have data.
        """
        log = self.folder.path / "rewards.log"
        for name, found in errors.items():
            self.journal(
                "reward_errors",
                step=step,
                name=name,
                count=len(found),
                causes=dict(Counter(error.cause for error in found)),
                first=found[0].message,
            )
            for error in found:
                kind = (name, error.cause, *_SOURCE_LINE.findall(error.message))
                if kind not in self._shown_errors:
                    self._shown_errors.add(kind)
                    what = f"step {step}: reward {name!r} {error.message}"
                    self.say(f"{what}; details in {log}; further errors like it are only counted")

    def skipped_update(self, step: int, why: str, *, batch: str) -> None:
        """Shows and journals a skipped update and the file with its batch."""
        file = f"{self.folder.rollouts.name}/{batch}.jsonl"
        text = f"step {step}: the update was skipped: {why}; its batch is in {file}"
        self.event("update_skipped", text, step=step, why=why, batch=file)

    def evaluation(
        self,
        name: str,
        step: int,
        summary: Mapping[str, Any],
        *,
        answers: Sequence[Mapping[str, Any]],
        adapter: str,
        file: str | None = None,
        version: int | None = None,
    ) -> dict[str, Any]:
        """Records an evaluation: its answers in a file, then its result in the journal.

        Args:
            name: of the evaluation.
            step: steps done so far.
            summary: its result.
            answers: one JSON object for each.
            adapter: hash of the adapter that was evaluated.
            file: name for `RunFolder.write_rollouts`; None: `name`.
            version: the policy version that was evaluated; None: the one of this step.

        Returns:
            The journal entry.
        """
        file = file or name
        self.folder.write_rollouts(file, answers)
        entry = {
            "name": name,
            "step": step if version is None else version,
            "adapter_sha256": adapter,
            "rewards_version": rewards_version(self.folder.entries()),
            **summary,
            "file": file,
        }
        self.folder.journal("evaluated", **entry)
        self.console.say(f"{name}: {evaluation_line(summary)}")
        metrics = _evaluation_metrics(name, summary)
        self.tracker.log_evaluation(name, metrics, version=entry["step"], step=step)
        return entry

    def best(self, entry: Mapping[str, Any] | None) -> None:
        """Shows the journal entry of the best validation on the console and in W&B's summary."""
        if entry is not None and entry != self._best:
            self._best = entry
            shown = {"step": entry["step"], "metric": metric_title(entry), "value": mean_of(entry)}
            self.console.update(best_validation=shown)
            metrics = _evaluation_metrics(entry["name"], entry)
            self.tracker.summarize({"best/step": entry["step"], **metrics})

    def comparison(self, name: str, compared: Mapping[str, Any]) -> None:
        """Shows the result of `evaluation.compare`."""
        before, after, p = (compared[key] for key in ("before", "after", "paired_p"))
        change = f"{name} {metric_title(before)} {show_change(before, after, compared)}"
        self.say(change if p is None else f"{change}, paired p = {p:.1e}")

    def checkpoint(self, facts: Mapping[str, Any]) -> None:
        """Records a complete checkpoint: its step and seconds."""
        self.journal("checkpoint", **facts)
        self._mirror.request()

    def exported(self, facts: Mapping[str, Any]) -> None:
        """Records an export: the fields of its `ExportReport`, hash, seconds and reason."""
        equal = (
            "read back number by number; the devices have no room to score it"
            if facts["mean_difference"] is None
            else f"log-probs differ by {facts['mean_difference']:.1e} on average"
        )
        text = f"export: {facts['folder']}, version {facts['version']}, {equal}"
        self.event("exported", text, **facts)
        self._mirror.request()
        if facts["reason"] != "first":  # of the untrained policy
            self.tracker.summarize({"export/version": facts["version"]})
            metadata = {name: facts[name] for name in ("version", "adapter_sha256", "reason")}
            self.tracker.log_adapter(Path(facts["folder"]), metadata=metadata)

    def alarm(self, alarm: Alarm) -> None:
        """Records an alarm, makes it the last one on the console, and sends an alert."""
        self.event("alarm", alarm.text, **alarm.facts)
        self.console.update(last_alarm={"step": alarm.step, "rule": alarm.rule, "text": alarm.text})
        title = f"alarm {alarm.rule} {alarm.part}".strip()
        self.tracker.alert(title, alarm.text, level="ERROR" if alarm.action == "stop" else "WARN")

    # --- events

    def journal(self, event: str, **facts: Any) -> None:
        """Appends an entry to the journal."""
        self.folder.journal(event, **facts)

    def event(self, event: str, text: str, **facts: Any) -> None:
        """Appends an entry to the journal and shows `text` on the console."""
        self.folder.journal(event, **facts)
        self.console.say(text)

    def say(self, text: str) -> None:
        """Shows a line on the console."""
        self.console.say(text)

    def activity(self, what: str, unit: str) -> AbstractContextManager[ShowProgress]:
        """Shows the progress of its block on the console."""
        return self.console.activity(what, unit)
