"""The checkpoints of a run: when one is being written, and which one is complete.

The learner writes the files in the background; see `pipeline/compute/learner/checkpoint.py`.
"""

from __future__ import annotations

from typing import Any

from pipeline.deadline import CHECKPOINT
from pipeline.progress import Progress
from pipeline.run.history import provenance
from pipeline.run_context import RunContext


class CheckpointWriter:
    """Writes `checkpoints/`; one at a time."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        saved = [entry["step"] for entry in run.folder.valid_entries("checkpoint")]
        self._saved = saved[-1] if saved else -1
        self._saving: dict[str, Any] | None = None
        self._provenance = provenance(run.folder.entries())

    async def save(self, progress: Progress) -> None:
        """Begins to write a checkpoint, if there is none of this step.

        It counts from when `settle` finds it complete. The first one of a run is waited for: the
        deadline needs to know its duration.
        """
        await self.settle()
        if progress.step == self._saved:
            return
        began_s = self._run.now_s
        with self._run.phases.during("checkpoint"):
            await self._run.workers.learner.save(
                {**progress.to_meta(), "provenance": self._provenance}
            )
        self._saving = {
            "step": progress.step,
            "elapsed_s": began_s,
            "waited_s": self._run.now_s - began_s,
        }
        if self._saved < 0:
            await self.settle()

    async def settle(self, *, wait: bool = True) -> None:
        """Journals the checkpoint that is being written, once it is complete or if it is now."""
        if self._saving is None:
            return
        with self._run.phases.during("checkpoint"):
            seconds = await self._run.workers.learner.saved(wait=wait)
        if seconds is None:
            return
        saving, self._saving = self._saving, None
        self._run.deadline.parts.observe(CHECKPOINT, seconds)
        self._saved = saving["step"]
        self._run.records.checkpoint({**saving, "seconds": seconds})
