"""The export folder of a run: which version it holds, and its replacement by another one.

When to export, and which version, is the coordinator's decision; the learner writes the files.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.deadline import EXPORT
from pipeline.evaluate.notices import UNTRAINED_EXPORT, untrained_export
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.run_context import RunContext
from pipeline.types import AdapterRef


class Exports:
    """Writes `export/`; the schedule has the best version, and answers to compare log-probs on."""

    def __init__(self, run: RunContext, schedule: EvaluationSchedule) -> None:
        self._run = run
        self._schedule = schedule
        self._journaled = list(run.folder.events("exported"))

    @property
    def current(self) -> dict[str, Any] | None:
        """The journal entry of the content of `export/`; None: it is empty."""
        there = self._journaled and self._run.folder.export.is_dir()
        return self._journaled[-1] if there else None

    @property
    def is_behind(self) -> bool:
        """Whether the best version is not the exported one, by its hash."""
        best, exported = self._schedule.best, (self.current or {}).get("adapter_sha256")
        return best is not None and best["adapter_sha256"] != exported

    @property
    def is_loaded(self) -> bool:
        """Whether the samplers hold the exported adapter."""
        loaded, exported = self._run.workers.published, (self.current or {}).get("adapter_sha256")
        return loaded is not None and loaded.sha256 == exported

    def best(self, step: int) -> AdapterRef:
        """The best version by validation, or the current one; `step` training steps are done."""
        best = self._schedule.best
        return "current" if best is None or best["step"] == step else "best"

    def untrained(self, step: int) -> dict[str, str]:
        """For `summary.json` after `step` steps: why the export is untrained, if it is."""
        current, schedule = self.current, self._schedule
        if current is None or current["version"]:
            return {}
        text = untrained_export(self._run.config, step=step, validations=schedule.validations)
        return {} if text is None else {UNTRAINED_EXPORT: text}

    async def export(self, which: AdapterRef, *, reason: str) -> None:
        """Replaces the export by that of an adapter; `reason` is for the journal."""
        run, began_s = self._run, self._run.now_s
        examples = await self._schedule.examples()
        report = await run.workers.learner.export(str(run.folder.export), examples, which=which)
        best, published = self._schedule.best, run.workers.published
        assert published is not None
        exported = best["adapter_sha256"] if which == "best" and best else published.sha256
        facts: dict[str, Any] = {
            **asdict(report),
            "adapter_sha256": exported,
            "seconds": run.observe(EXPORT, began_s),
            "reason": reason,
        }
        self._journaled.append(facts)
        run.records.exported(facts)
