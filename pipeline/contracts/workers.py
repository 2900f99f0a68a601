"""Protocols of the workers: Ray actors in a run, plain objects in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipeline.contracts.adapters import (
    AdapterRef,
    BestFile,
    ExportReport,
    OpenedAdapter,
    Published,
)
from pipeline.contracts.batches import PackedRow
from pipeline.contracts.builds import Building, Ready
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.phases import Heartbeat, Span
from pipeline.contracts.rollouts import Completion, DecodeWork, Rollout, RolloutRequest
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds
from rewards.base import Outcome, RewardInput


class WorkerDied(RuntimeError):  # noqa: N818  # named after what happened
    """The process of a worker has ended; the message says which, and how."""

    def __init__(self, worker: str, why: str) -> None:
        super().__init__(f"{worker}: {why}")


@dataclass(frozen=True)
class ProcessUse:
    """What a process does with its time and memory.

    Attributes:
        spans: its phases since the last report.
        memory: of its fullest device; None: unknown.
        programs: programs that it has compiled or read from the cache.
        programs_s: seconds of them.
    """

    spans: Sequence[Span] = ()
    memory: MemoryUse | None = None
    programs: int = 0
    programs_s: float = 0.0


class Sampler(Protocol):
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

        Args:
            requests: prompts with their rollout names.
            temperature: 0 is greedy.
            min_finished: number of finished completions after which the others are returned
                unfinished, with stop reason "truncated"; None: all finish.
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


class AdapterSampler(Sampler, Protocol):
    """A sampler that loads adapters from files."""

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        """Loads the adapter at `path`; None: the base alone.

        Raises:
            FileNotFoundError: if there is no adapter.
            ValueError: if the adapter cannot be used, or is not for this base.
        """


class Learner(Protocol):
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
        lr: float | None = None,
        kl_coef: float | None = None,
    ) -> dict[str, float]:
        """Updates on one step's rollouts; returns metrics. The version increases by one.

        Args:
            rollouts: training samples of the step.
            rate: learning rate of the step, if the decay is planned by the clock; None otherwise.
            lr: peak of the schedule otherwise; None: `learner.lr`.
            kl_coef: coefficient of the KL term, if there is one; None: `learner.kl_coef`.
        """

    async def save(self, meta: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint of the current version together with `meta`.

        Returns when the state is copied; the next update may follow. Waits for the write before.

        Raises:
            OSError: if the checkpoint before could not be written.
        """

    async def saved(self, *, wait: bool) -> float | None:
        """Returns the seconds from the last `save` until its checkpoint was complete.

        Args:
            wait: until it is complete; otherwise the result is None if it is not.

        Raises:
            OSError: if it could not be written.
        """

    async def keep_best(self) -> None:
        """Saves the current adapter as the best so far, replacing the former best.

        It is written after the checkpoint that is being written.
        """

    async def recover_best(self, version: int, sha256: str) -> BestFile:
        """Ensures that the best adapter's file is valid; recovers it from the run folder if not.

        Args:
            version: policy version of the best adapter.
            sha256: hash of the best adapter.

        Returns:
            State of the file; after "lost" there is none.
        """

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """Writes the merged model and verifies it by loading it back."""


class Scorer(Protocol):
    """Runs the reward functions."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """Returns for each input the outcome of each function, by name; calls may overlap."""

    async def notices(self) -> list[str]:
        """Returns a line for each function that has printed something for the first time."""


class MeasuredScorer(Scorer, Protocol):
    """A scorer that reports when its processes score."""

    async def busy(self) -> dict[str, list[tuple[float, float]]]:
        """Returns when each reward process has scored since the last call: unix seconds, by name.

        A name is that of the function and the number of the process.
        """


class Resizable(Protocol):
    """A process that compiles its programs for given sizes."""

    async def prepare(self, sizes: Sizes) -> Ready:
        """Compiles for these sizes; programs of other sizes are freed.

        Raises:
            OutOfMemory: if the sizes need too much memory; smaller ones may be tried.
        """

    async def building(self) -> Building:
        """Returns the progress of compilation; can be called while `prepare` runs."""


class Process(Resizable, Protocol):
    """A process with the model: reports what it does with its time and memory, can be traced."""

    async def use(self) -> ProcessUse:
        """Returns its phases since the last call, and its memory; can be called at any time."""

    async def heartbeat(self) -> Heartbeat:
        """Returns what the process does now; can be called at any time."""

    async def start_trace(self, folder: str) -> None:
        """Begins a JAX profiler trace, which `stop_trace` writes to this folder."""

    async def stop_trace(self) -> None:
        """Ends the trace and writes it."""


class SamplerProcess(Sampler, Process, Protocol):
    """The process of a sampler."""


class LearnerProcess(Learner, Process, Protocol):
    """The process of a learner."""


class MeasurableSampler(Protocol):
    """A sampler that measures its own speed."""

    async def sampler_speed(self) -> Speeds:
        """Returns the measured seconds of the compiled programs.

        Raises:
            OutOfMemory: if the slots do not fit into memory.
        """


class MeasurableLearner(Protocol):
    """A learner that measures its own speed."""

    async def learner_speed(self) -> Speeds:
        """Returns the measured seconds of the compiled programs.

        Raises:
            OutOfMemory: if a micro-batch does not fit into memory.
        """
