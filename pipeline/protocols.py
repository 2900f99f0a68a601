"""Protocols of the workers: Ray actors in a run, plain objects in tests.

Also what workers raise and report across process boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipeline.clock import Heartbeat
from pipeline.compute.builds import Building, Ready
from pipeline.data.packed_batch import PackedRow
from pipeline.plan.sizes import Sizes, WorkerPhase
from pipeline.types import (
    AdapterRef,
    Completion,
    DecodeWork,
    ExportReport,
    OpenedAdapter,
    Published,
    Rollout,
    RolloutRequest,
)
from rewards.base import Outcome, RewardInput


class OutOfMemory(Exception):  # noqa: N818  # asks for smaller sizes, like a signal
    """A process ran out of device or host memory; it is alive.

    Attributes:
        phase: activity of the process.
        what: the error, one line.
        share: available memory as a share of the required memory; None: unknown.
    """

    def __init__(self, phase: WorkerPhase, what: str, share: float | None = None) -> None:
        super().__init__(phase, what, share)
        self.phase = phase
        self.what = what
        self.share = share

    def __str__(self) -> str:
        return f"out of memory ({self.phase}): {self.what}"


class NothingSmaller(OutOfMemory):
    """Out of memory, and there are no smaller sizes to continue with; `what` is a sentence."""

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the fullest device of a process.

    Attributes:
        compiled: during the largest program: all current arrays plus its temporaries as reported by
            the compiler; None: there are no programs.
        in_use: of all current arrays.
        peak: peak bytes in use, as reported by the device; None: it reports none, such as a CPU.
    """

    compiled: int | None
    in_use: int
    peak: int | None = None


class WorkerDied(RuntimeError):  # noqa: N818  # named after what happened
    """The process of a worker has ended; the message says which, and how."""

    def __init__(self, worker: str, why: str) -> None:
        super().__init__(f"{worker}: {why}")


@dataclass(frozen=True)
class ProcessUse:
    """What a process does with its time and memory.

    Attributes:
        seconds: by phase since the last report.
        memory: of its fullest device; None: unknown.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: MemoryUse | None = None


@dataclass(frozen=True)
class SamplerTimes:
    """Seconds of a sampler's warm programs, host work included.

    Attributes:
        segment_s: of a segment with all slots busy, and of the check for finished ones, by slots.
        prefill_s: of a prefill and of filling the slots of its prompts, by prompt bucket.
    """

    segment_s: Mapping[int, float]
    prefill_s: Mapping[int, float]


class Worker(Protocol):
    """A process with the model."""

    async def prepare(self, sizes: Sizes) -> Ready:
        """Compiles for these sizes; programs of other sizes are freed.

        Raises:
            OutOfMemory: if the sizes need too much memory; smaller ones may be tried.
        """

    async def building(self) -> Building:
        """Returns the progress of compilation; can be called while `prepare` runs."""

    async def use(self) -> ProcessUse:
        """Returns its time since the last call, and its memory; can be called at any time."""

    async def heartbeat(self) -> Heartbeat:
        """Returns what the process does now; can be called at any time."""

    async def start_trace(self, folder: str) -> None:
        """Begins a JAX profiler trace, which `stop_trace` writes to this folder."""

    async def stop_trace(self) -> None:
        """Ends the trace and writes it."""


class Sampler(Worker, Protocol):
    """Generates completions under the adapter that was loaded last."""

    async def load(self, published: Published) -> str:
        """Loads an adapter; returns the hash of the adapter on the devices."""

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        """Returns one completion per request, in the order of the requests.

        After `min_finished` finished ones the others are returned unfinished, with stop reason
        "truncated"; None: all finish. A temperature of 0 is greedy.
        """

    async def finished(self) -> list[Completion]:
        """Returns the rollouts that a running `generate` has finished since the last call.

        `generate` returns them again. After a repeated call some of them may differ.
        """

    async def work(self) -> DecodeWork:
        """Returns the amount of work of the last `generate`."""

    async def abort(self) -> None:
        """Makes a running `generate` and every later one end soon, with an error."""

    async def resume(self) -> None:
        """Allows `generate` again after the aborted calls have ended."""

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        """Loads the adapter at `path`; None: the base alone.

        Raises:
            FileNotFoundError: if there is no adapter.
            ValueError: if the adapter cannot be used, or is not for this base.
        """

    async def sampler_times(self) -> SamplerTimes:
        """Returns the seconds of the compiled programs.

        Raises:
            OutOfMemory: if the slots do not fit into memory.
        """


class Learner(Worker, Protocol):
    """Owns adapter and optimizer state."""

    async def publish(self, which: AdapterRef = "current") -> Published:
        """Returns an adapter for the samplers."""

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        """Returns the log-probs of the completions' tokens under an adapter."""

    async def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """Updates on one step's packed demonstrations; returns metrics.

        The version increases by one.
        """

    async def update(
        self,
        rollouts: Sequence[Rollout],
        *,
        rate: float | None = None,
    ) -> dict[str, float]:
        """Updates on one step's rollouts; returns metrics. The version increases by one.

        `rate` is the learning rate if it decays with the time used; None: the learner's schedule.
        """

    async def save(self, meta: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint of the current version together with `meta`.

        Returns when the state is copied; the next update may follow. Waits for the write before.

        Raises:
            OSError: if the checkpoint before could not be written.
        """

    async def saved(self, *, wait: bool) -> float | None:
        """Returns the seconds from the last `save` until its checkpoint was complete.

        Does not wait for that if not told to: the result is None if it is not complete.

        Raises:
            OSError: if it could not be written.
        """

    async def keep_best(self) -> None:
        """Saves the current adapter as the best so far, replacing the former best.

        It is written after the checkpoint that is being written.
        """

    async def recover_best(self, version: int, sha256: str) -> None:
        """Writes the best adapter's file from its checkpoint, unless it holds this adapter.

        Raises:
            DamagedFileError: if the checkpoint is gone, with the remedy.
        """

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """Writes the merged model and verifies it by loading it back."""

    async def micro_batch_s(self) -> float:
        """Returns the seconds of the largest micro-batch.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory.
        """


class Scorer(Protocol):
    """Runs the reward functions."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """Returns for each input the outcome of each function, by name; calls may overlap."""

    async def notices(self) -> list[str]:
        """Returns a line for each function that has printed something for the first time."""

    async def busy_s(self) -> dict[str, float]:
        """Returns the seconds of scoring since the last call, by function."""
