"""The export folder of a run: which version it holds, and its replacement by another one.

When to export, and which version, is the controller's decision; the learner writes the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.contracts.adapters import AdapterRef, ExportReport
from pipeline.contracts.clock import Stopwatch
from pipeline.contracts.decisions import EXPORT, Measure
from pipeline.contracts.memory import OutOfMemory
from pipeline.evaluate.notices import UNTRAINED_EXPORT, untrained_export
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.rollout.workers import Workers
from pipeline.run.records import Records

COMPARED = 32
"""Number of answers whose log-probs an export has to reproduce."""


class Exports:
    """Writes `export/`.

    Args:
        schedule: has the best version, and answers to compare log-probs on.
        workers: the learner writes the files.
        records: journal of the exports, those of earlier processes included.
        now: reads the clock, in seconds.
        measure: receives how long each export takes.
    """

    def __init__(
        self,
        schedule: EvaluationSchedule,
        *,
        workers: Workers,
        records: Records,
        now: Callable[[], float],
        measure: Measure,
    ) -> None:
        self._schedule = schedule
        self._workers = workers
        self._records = records
        self._now = now
        self._measure = measure
        self._journaled = list(records.folder.events("exported"))

    @property
    def current(self) -> dict[str, Any] | None:
        """The journal entry of the content of `export/`; None: it is empty."""
        there = self._journaled and self._records.folder.export.is_dir()
        return self._journaled[-1] if there else None

    def untrained(self, step: int) -> dict[str, str]:
        """For `summary.json`: says that the export is the model before training; empty if not.

        Args:
            step: training steps done.
        """
        current, schedule = self.current, self._schedule
        if current is None or current["version"]:
            return {}
        text = untrained_export(schedule.config, step=step, validations=schedule.validations)
        return {} if text is None else {UNTRAINED_EXPORT: text}

    async def export(self, which: AdapterRef, *, reason: str) -> None:
        """Replaces the export.

        Args:
            which: adapter to export.
            reason: for the journal.
        """
        watch = Stopwatch(self._now)
        report = await self._write(self._records.folder.export, which)
        best, published = self._schedule.best, self._workers.published
        assert published is not None
        exported = best["adapter_sha256"] if which == "best" and best else published.sha256
        facts: dict[str, Any] = {
            **asdict(report),
            "adapter_sha256": exported,
            "seconds": watch.total_s,
            "reason": reason,
        }
        self._journaled.append(facts)
        self._measure(EXPORT, watch.total_s)
        self._records.exported(facts)

    async def copy(self, step: int) -> None:
        """Writes the current version to `exports/step_NNNNNN`, beside `export/`.

        A failure for want of memory or disk is journaled: a request must not end the run.

        Args:
            step: training steps done.
        """
        watch = Stopwatch(self._now)
        folder = self._records.folder.path / "exports" / f"step_{step:06d}"
        try:
            folder.parent.mkdir(exist_ok=True)
            report = await self._write(folder, "current")
        except (OSError, OutOfMemory) as error:
            self._records.export_failed(folder, str(error), step=step)
            return
        self._measure(EXPORT, watch.total_s)
        published = self._workers.published
        assert published is not None
        self._records.exported_copy(
            {
                **asdict(report),
                "adapter_sha256": published.sha256,
                "seconds": watch.total_s,
                "step": step,
            }
        )

    async def _write(self, folder: Path, which: AdapterRef) -> ExportReport:
        examples = await self._schedule.examples(COMPARED)
        return await self._workers.learner.export(str(folder), examples, which=which)
