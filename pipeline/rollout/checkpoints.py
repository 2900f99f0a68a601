"""The checkpoints of a run: when one is being written, and which one is complete.

The learner writes the files in the background; see `pipeline/compute/learner/checkpoint.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from pipeline.clock import Clock, PhaseClock, Stopwatch
from pipeline.deadline import CHECKPOINT, Deadline
from pipeline.progress import Progress
from pipeline.rollout.workers import Workers
from pipeline.run.history import provenance
from pipeline.run.records import Records

STOP_S = 30.0
"""Maximum seconds that the checkpoint at a stop signal may take."""


class Checkpoints:
    """Writes `checkpoints/`; one at a time.

    Args:
        workers: the learner writes the files.
        records: journal of the checkpoints, those of earlier processes included.
        phases: of the driver.
        clock: of the run.
        deadline: learns how long each checkpoint takes.
    """

    def __init__(
        self,
        *,
        workers: Workers,
        records: Records,
        phases: PhaseClock,
        clock: Clock,
        deadline: Deadline,
    ) -> None:
        self._workers = workers
        self._records = records
        self._phases = phases
        self._clock = clock
        self._deadline = deadline
        saved = [entry["step"] for entry in records.folder.events("checkpoint")]
        self._saved = saved[-1] if saved else -1
        self._saving: dict[str, Any] | None = None
        self._provenance = provenance(records.folder.entries())

    async def save(self, progress: Progress) -> None:
        """Begins to write a checkpoint; it counts from when `settle` finds it complete.

        The first one of a run is waited for: the deadline needs to know its duration.
        """
        await self.settle()
        progress = replace(progress, wall_s=self._clock.elapsed_s)
        watch = Stopwatch(self._clock.now)
        with self._phases.during("checkpoint"):
            await self._workers.learner.save({**progress.to_meta(), "provenance": self._provenance})
        self._saving = {
            "step": progress.step,
            "wall_s": progress.wall_s,
            "waited_s": watch.total_s,
        }
        if self._saved < 0:
            await self.settle()

    async def settle(self, *, wait: bool = True) -> None:
        """Journals the checkpoint that is being written, once it is complete or if it is now."""
        if self._saving is None:
            return
        with self._phases.during("checkpoint"):
            seconds = await self._workers.learner.saved(wait=wait)
        if seconds is None:
            return
        saving, self._saving = self._saving, None
        if saving["step"] != self._saved:
            self._deadline.parts.observe(CHECKPOINT, seconds)
        self._saved = saving["step"]
        self._records.checkpoint({**saving, "seconds": seconds})

    async def save_at_stop(self, progress: Progress) -> None:
        """Writes a checkpoint; if that takes too long, the last complete one stands."""
        try:
            async with asyncio.timeout(STOP_S):
                await self.save(progress)
                await self.settle()
        except TimeoutError:
            last = f"that of step {self._saved} stands" if self._saved >= 0 else "there is none"
            self._records.event(
                "checkpoint_abandoned",
                f"the checkpoint of step {progress.step} is not complete after "
                f"{STOP_S:.0f} s and is abandoned; {last}",
                step=progress.step,
                last=self._saved,
            )
