"""The tables of `launch.runs`: runs of a folder, and the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.deadline import show_duration
from pipeline.evaluate.summary import mean_of, show_mean
from pipeline.run.checkpoint_files import (
    CheckpointFiles,
    best_version,
    folder_bytes,
    read_checkpoints,
)
from pipeline.run.goodput import time_lines
from pipeline.run.report.facts import cost, readable_time, state
from pipeline.run.report.run_records import RunRecords, read_run
from pipeline.tables import table


@dataclass(frozen=True)
class RunFacts:
    """What `launch.runs` shows of a run; `best` is the version of the best adapter that is kept."""

    records: RunRecords
    num_bytes: int
    checkpoints: Sequence[CheckpointFiles]
    best: int | None

    @property
    def last_activity(self) -> str:
        """The last time stamp of its records; "" if there is none."""
        last_entry = self.records.journal[-1] if self.records.journal else {}
        return max(one.get("time", "") for one in (self.records.status, last_entry))

    def complete(self, step: int) -> str:
        """When the checkpoint of a step was last complete; "" if a kill came before its record."""
        saved = {entry["step"]: entry["time"] for entry in self.records.entries("checkpoint")}
        return saved.get(step, "")

    def why_kept(self, step: int) -> str:
        """Why retention keeps the checkpoint of a step."""
        keep = self.records.setting("checkpoint.keep") or 1
        every = self.records.setting("checkpoint.keep_every")
        newest = {one.step for one in self.checkpoints[-keep:]}
        reasons = {
            "newest" if keep == 1 else f"one of the {keep} newest": step in newest,
            "best by validation": step == self.best,
            f"every {every} steps": every is not None and step % every == 0,
        }
        return ", ".join(why for why, holds in reasons.items() if holds) or "until the next save"

    def to_json(self) -> dict[str, Any]:
        """What the tables show."""
        best = self.records.best_validation
        return {
            "run": self.records.name,
            "path": str(self.records.path),
            "state": state(self.records)[0],
            "steps": self.records.steps,
            "steps_planned": self.records.steps_planned,
            "best_validation": None
            if best is None
            else {"step": best["step"], "metric": best["metric"], "mean": mean_of(best)},
            "bytes": self.num_bytes,
            "last_activity": self.last_activity,
            "forked_from": self.records.setting("run.fork"),
            **self.records.time_use.to_json(),
            "checkpoints": [
                {
                    "step": one.step,
                    "complete": self.complete(one.step),
                    "bytes": one.num_bytes,
                    "adapter_sha256": one.adapter_sha256,
                    "kept": self.why_kept(one.step),
                    "provenance": dict(one.provenance),
                }
                for one in self.checkpoints
            ],
        }


def run_folders(parent: Path) -> list[Path]:
    """The run folders directly below a folder."""
    return sorted(path.parent for path in parent.glob("*/config.json"))


def read_facts(path: Path) -> RunFacts:
    """Reads a run folder."""
    checkpoints = path / "checkpoints"
    return RunFacts(
        read_run(path), folder_bytes(path), read_checkpoints(checkpoints), best_version(checkpoints)
    )


def run_lines(runs: Sequence[RunFacts]) -> Iterator[str]:
    """A table of runs."""
    rows = [["run", "state", "steps", "best validation", "time", "goodput", "MB", "last activity"]]
    for run in runs:
        records, use = run.records, run.records.time_use
        planned = records.steps_planned
        rows.append(
            [
                records.path.name,
                state(records)[0],
                f"{records.steps}" + (f"/{planned}" if planned else ""),
                _best(records),
                show_duration(use.wall_s),
                f"{use.goodput['total']:.0%}" if use.goodput else "",
                _megabytes(run.num_bytes),
                readable_time(run.last_activity),
            ]
        )
    yield from table(rows)


def checkpoint_lines(run: RunFacts) -> Iterator[str]:
    """A run, and a table of its checkpoints."""
    records = run.records
    (word, sentence), planned = state(records), records.steps_planned
    steps = f"{records.steps}" + (f" of {planned}" if planned else "") + " steps"
    best = f", best validation {best}" if (best := _best(records)) else ""
    yield f"{records.path}: {word}, {steps}{best}, {_megabytes(run.num_bytes)} MB"
    yield sentence
    if (fork := records.setting("run.fork")) is not None:
        yield f"forked from {fork}"
    yield from time_lines(records.time_use, cost=cost(records))
    if not run.checkpoints:
        yield "no checkpoints"
        return
    rows = [["step", "complete", "MB", "adapter", "kept"]]
    rows += [
        [
            str(one.step),
            readable_time(run.complete(one.step)),
            _megabytes(one.num_bytes),
            one.adapter_sha256[:12],
            run.why_kept(one.step),
        ]
        for one in run.checkpoints
    ]
    yield from table(rows)


def _best(run: RunRecords) -> str:
    """The best validation; "" if there is none."""
    best = run.best_validation
    return "" if best is None else f"{show_mean(best)} at step {best['step']}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"
