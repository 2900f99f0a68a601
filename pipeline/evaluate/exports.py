"""The export folder of a run: which version it holds, and its replacement by another one.

When to export, and which version, is the coordinator's decision; the learner writes the files.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.clock import Clock, Stopwatch
from pipeline.deadline import EXPORT, Deadline
from pipeline.evaluate.notices import UNTRAINED_EXPORT, untrained_export
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.rollout.workers import Workers
from pipeline.run.records import Records
from pipeline.types import AdapterRef


class Exports:
    """Writes `export/`.

    Args:
        schedule: has the best version, and answers to compare log-probs on.
        workers: the learner writes the files.
        records: journal of the exports, those of earlier processes included.
        deadline: learns how long each export takes.
        clock: of the run.
    """

    def __init__(
        self,
        schedule: EvaluationSchedule,
        *,
        workers: Workers,
        records: Records,
        deadline: Deadline,
        clock: Clock,
    ) -> None:
        self._schedule = schedule
        self._workers = workers
        self._records = records
        self._deadline = deadline
        self._clock = clock
        self._journaled = list(records.folder.events("exported"))

    @property
    def current(self) -> dict[str, Any] | None:
        """The journal entry of the content of `export/`; None: it is empty."""
        there = self._journaled and self._records.folder.export.is_dir()
        return self._journaled[-1] if there else None

    @property
    def is_behind(self) -> bool:
        """Whether the best version is not the exported one.

        Compares hashes: a version that is trained again after its checkpoint was lost may differ.
        """
        best, current = self._schedule.best, self.current
        exported = None if current is None else current["adapter_sha256"]
        return best is not None and best["adapter_sha256"] != exported

    @property
    def is_loaded(self) -> bool:
        """Whether the samplers hold the exported adapter."""
        current, loaded = self.current, self._workers.published
        if current is None or loaded is None:
            return False
        return bool(current["adapter_sha256"] == loaded.sha256)

    @property
    def is_evaluated(self) -> bool:
        """Whether any split was evaluated with the exported adapter."""
        evaluated = self._records.events("evaluated")
        exported = None if self.current is None else self.current["adapter_sha256"]
        return any(entry["adapter_sha256"] == exported for entry in evaluated)

    def best(self, step: int) -> AdapterRef:
        """The best version by validation, or the current one; `step` training steps are done."""
        best = self._schedule.best
        return "current" if best is None or best["step"] == step else "best"

    def untrained(self, step: int) -> dict[str, str]:
        """For `summary.json` after `step` steps: why the export is untrained, if it is."""
        current, schedule = self.current, self._schedule
        if current is None or current["version"]:
            return {}
        text = untrained_export(schedule.config, step=step, validations=schedule.validations)
        return {} if text is None else {UNTRAINED_EXPORT: text}

    async def export(self, which: AdapterRef, *, reason: str) -> None:
        """Replaces the export by that of an adapter; `reason` is for the journal."""
        watch = Stopwatch(self._clock.now)
        examples = await self._schedule.examples()
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
        self._deadline.parts.observe(EXPORT, watch.total_s)
        if self._deadline.is_timed:  # a resumed run reads it
            now_s = self._clock.elapsed_s
            self._records.journal("reserved", reason=EXPORT, seconds=watch.total_s, elapsed_s=now_s)
        self._records.exported(facts)
