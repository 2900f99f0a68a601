"""What the parts of the training loop share."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Config
from pipeline.clock import Clock, PhaseClock
from pipeline.data.splits import LoadedData
from pipeline.data.text.prompts import PromptMaker
from pipeline.deadline import Deadline
from pipeline.plan.sizes import Sizes
from pipeline.rollout.workers import Workers
from pipeline.run.meter import RunMeter
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder


@dataclass(frozen=True)
class RunContext:
    """One process of a run; `resumed_from` is the step of the checkpoint that it started from."""

    config: Config
    data: LoadedData
    maker: PromptMaker
    workers: Workers
    records: Records
    meter: RunMeter
    deadline: Deadline
    clock: Clock
    sizes: Sizes
    resumed_from: int | None

    @property
    def phases(self) -> PhaseClock:
        """The phases of the driver."""
        return self.meter.phases

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self.records.folder

    def observe(self, part: str, began_s: float) -> float:
        """Measures a part of the end that began at `began_s`; returns its seconds.

        They are journaled for a resumed run.
        """
        seconds = self.now_s - began_s
        self.deadline.parts.observe(part, seconds)
        self.records.journal("reserved", reason=part, seconds=seconds, elapsed_s=self.now_s)
        return seconds

    @property
    def now_s(self) -> float:
        """Seconds that the run has used."""
        return self.clock.elapsed_s
