"""The export folder of a run: which version it holds, and its replacement by another one.

When to export, and which version, is the controller's decision; the learner writes the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pipeline.contracts.adapters import AdapterRef
from pipeline.contracts.clock import Stopwatch
from pipeline.contracts.decisions import EXPORT, Measure
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

    async def export(self, which: AdapterRef, *, reason: str) -> None:
        """Replaces the export.

        Args:
            which: adapter to export.
            reason: for the journal.
        """
        watch = Stopwatch(self._now)
        examples = await self._schedule.examples(COMPARED)
        folder = str(self._records.folder.export)
        report = await self._workers.learner.export(folder, examples, which=which)
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
