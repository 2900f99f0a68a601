"""Calls workers; holds no training logic.

    coordinator, producer, evaluation -> Workers -> sampler | learner | scorer

`Workers` adds the time limit, the stop signal and the check that samplers hold the published
adapter. The death of a process raises `WorkerDied`, which ends the process of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from configs.schema import Config
from pipeline.clock import Clock
from pipeline.protocols import Learner, ProcessUse, Sampler, Scorer, Worker, WorkerDied
from pipeline.rollout import dispatch, mismatch
from pipeline.rollout.rollout_step import RolloutStep, TrainingStep
from pipeline.rollout.scoring import EarlyScoring
from pipeline.types import (
    AdapterRef,
    Completion,
    DecodeWork,
    Prompt,
    Published,
    Report,
    RolloutRequest,
    TrainStep,
)
from rewards.base import Outcome, RewardInput

T = TypeVar("T")

STOPPING_S = 30.0
"""Maximum seconds that an aborted sampler gets to stop."""


class Interrupted(Exception):  # noqa: N818  # not an error: the user asked for it
    """A signal arrived; running work is abandoned."""


class OutOfTime(Exception):  # noqa: N818  # not an error: the remaining time is reserved
    """Work took too long and was abandoned."""


class TrainingStopped(Exception):  # noqa: N818  # a problem of the run, named in the message
    """Training makes no progress; the user has to act."""


class Workers:
    """Samplers, learner and reward workers of a run.

    What can be abandoned raises `Interrupted` when the run is stopped, and `OutOfTime` at its
    deadline, which is in seconds on the run's clock.

    Args:
        samplers: at least one.
        learner: of the run.
        scorer: the reward workers.
        config: of the run.
        clock: the run's.
        stop: set from outside to end the run early.
        one_process: the sampler and the learner are the same process.

    Attributes:
        reporting: samplers and learner, by name.
        published: the adapter that the samplers hold; None: none yet.
    """

    def __init__(
        self,
        *,
        samplers: Sequence[Sampler],
        learner: Learner,
        scorer: Scorer,
        config: Config,
        clock: Clock,
        stop: asyncio.Event,
        one_process: bool = False,
    ) -> None:
        self.reporting: dict[str, Worker] = {"learner": learner}
        if not one_process:
            self.reporting |= {f"sampler {n}": sampler for n, sampler in enumerate(samplers)}
        self._config = config
        self.published: Published | None = None
        self._samplers = samplers
        self.learner = learner
        self.scorer = scorer
        self._clock = clock
        self._stop = stop

    # --- samplers

    async def probe(self, prompts: Sequence[Prompt]) -> float:
        """Difference of samplers and learner under a random adapter: `mismatch.probe_statistic`.

        Raises:
            MismatchError: if they are not the same policy.
        """
        work = mismatch.check_probe(self._samplers, self.learner, prompts, config=self._config)
        return await self._within(None, work, aborts=self._samplers)

    async def publish(self, which: AdapterRef = "current") -> Published:
        """Loads an adapter of the learner into the samplers.

        When the run is stopped, no adapter is loaded: an aborted sampler may be gone.
        """
        self.published = await self.learner.publish(which)
        if not self._stop.is_set():
            await mismatch.sync(self._samplers, self.published)
        return self.published

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        cut_off: float | None = None,
        deadline: float | None = None,
        report: Report | None = None,
    ) -> tuple[list[Completion], DecodeWork]:
        """See `dispatch.generate`; under the published adapter."""
        work = dispatch.generate(
            self._samplers, requests, temperature=temperature, cut_off=cut_off, report=report
        )
        completions, done = await self._within(deadline, work, aborts=self._samplers)
        assert self.published is not None
        mismatch.check_labels(completions, self.published)
        return completions, done

    # --- rewards

    async def score(
        self,
        inputs: Sequence[RewardInput],
        *,
        deadline: float | None = None,
        early: EarlyScoring | None = None,
    ) -> list[dict[str, Outcome]]:
        """The outcome of each reward function for each input; `early` has those of some."""
        work = self.scorer.score(inputs) if early is None else early.outcomes(inputs)
        return await self._within(deadline, work)

    # --- learner

    async def update(self, data: TrainingStep, step: TrainStep) -> dict[str, float]:
        """Updates the policy; returns the metrics of the update."""
        if isinstance(data, RolloutStep):
            return await self.learner.update(data.rollouts, rate=step.rate)
        return await self.learner.sft_update(data.sequences)

    # --- use of time and memory

    async def uses(self) -> dict[str, ProcessUse]:
        """What each process did with its time since the last call, and its memory, by name.

        The processes are learner, `sampler 0`, ...; `rewards` are all of the reward functions, with
        their time by function.
        """
        found = await asyncio.gather(*(process.use() for process in self.reporting.values()))
        rewards = ProcessUse(await self.scorer.busy_s())
        return {**dict(zip(self.reporting, found, strict=True)), "rewards": rewards}

    # --- stop signal and time limit

    def raise_if_stopped(self) -> None:
        """Ends the run between two pieces of work, if it is stopped."""
        if self._stop.is_set():
            raise Interrupted

    async def _within(
        self,
        until_s: float | None,
        work: Coroutine[Any, Any, T],
        *,
        aborts: Sequence[Sampler] = (),
    ) -> T:
        """The result of `work`, which is abandoned, or not started, where it cannot go on.

        Args:
            until_s: the deadline; None: there is none.
            work: to do.
            aborts: samplers to abort; they get `STOPPING_S` to stop.

        Raises:
            Interrupted: if the run is stopped.
            OutOfTime: at the deadline.
            WorkerDied: if a sampler does not stop at the deadline.
        """
        left_s = None if until_s is None else max(0.0, until_s - self._clock.elapsed_s)
        if self._stop.is_set() or left_s == 0:
            work.close()
            raise Interrupted if self._stop.is_set() else OutOfTime
        task, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            stopped.cancel()
        if task.done():
            return task.result()
        # Errors of aborting are ignored: a dead sampler has stopped.
        stopping = asyncio.gather(
            task, *(sampler.abort() for sampler in aborts), return_exceptions=True
        )
        try:
            await asyncio.wait_for(stopping, STOPPING_S if aborts else 0)
        except TimeoutError:
            if aborts and not self._stop.is_set():
                raise WorkerDied("sampler", f"it did not stop in {STOPPING_S:.0f} s") from None
        if self._stop.is_set():
            raise Interrupted
        await asyncio.gather(*(sampler.resume() for sampler in aborts))
        raise OutOfTime
