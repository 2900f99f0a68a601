"""Calls workers; holds no training logic.

    coordinator, producer, evaluation -> Workers -> sampler | learner | scorer

`Workers` adds the time limit, the stop signal and the check that samplers hold the published
adapter. The death of a process raises `WorkerDied`, which ends the process of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef, Published
from pipeline.contracts.clock import Clock
from pipeline.contracts.decisions import RemainingTime, TrainStep, WorkDeadline
from pipeline.contracts.phases import Span
from pipeline.contracts.rollouts import Completion, DecodeWork, Prompt, Report, RolloutRequest
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.workers import (
    LearnerProcess,
    MeasuredScorer,
    Process,
    ProcessUse,
    Sampler,
    SamplerProcess,
)
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.rollout import dispatch, parity
from pipeline.rollout.rollout_step import RolloutStep, TrainingStep
from pipeline.rollout.scoring import EarlyScoring
from rewards.base import Outcome, RewardInput

T = TypeVar("T")

ANSWER_S = 2.0
"""Maximum seconds to wait for the report of a process on its use, once for each report."""
TRACE_S = 60.0
"""Maximum seconds that a process gets to begin or write a trace."""
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

    Args:
        samplers: at least one.
        learner: of the run.
        scorer: the reward workers.
        sizes: decides the sizes of samplers and learner.
        config: of the run.
        clock: the run's.
        stop: set from outside to end the run early.
        one_process: the sampler and the learner are the same process, which is prepared once.

    Attributes:
        learner_process, sampler_processes: the processes; the same one in a colocated run.
        evaluation_tokens: tokens generated for evaluations.
        learner: of the run.
        scorer: the reward workers.
        reporting: samplers and learner, by name.
        published: the adapter that the samplers hold; None: none yet.
    """

    def __init__(
        self,
        *,
        samplers: Sequence[SamplerProcess],
        learner: LearnerProcess,
        scorer: MeasuredScorer,
        sizes: SizeController,
        config: Config,
        clock: Clock,
        stop: asyncio.Event,
        one_process: bool = False,
    ) -> None:
        name = "sampler and learner" if one_process else "learner"
        self.learner_process = Worker(name, learner)
        self.sampler_processes = [
            self.learner_process if one_process else Worker(f"sampler {number}", sampler)
            for number, sampler in enumerate(samplers)
        ]
        self.reporting: dict[str, Process] = {"learner": learner}
        if not one_process:
            self.reporting |= {f"sampler {n}": sampler for n, sampler in enumerate(samplers)}
        self._asked: dict[str, asyncio.Future[dict[str, ProcessUse]]] = {}
        self.sizes = sizes
        self._probe_bound = config.parity_bounds.probe
        self._max_new_tokens = config.rollout.max_new_tokens
        self.published: Published | None = None
        self.evaluation_tokens = 0
        self._samplers = samplers
        self.learner = learner
        self.scorer = scorer
        self._temperature = config.rollout.temperature
        self._clock = clock
        self._stop = stop
        self._stuck = False
        self._saving: Sizes | None = None

    @property
    def processes(self) -> list[Worker]:
        """Each process once, the learner's first."""
        workers = (self.learner_process, *self.sampler_processes)
        return list({id(worker): worker for worker in workers}.values())

    async def start(self) -> float:
        """Prepares all processes; returns the seconds that loading the learner's base took.

        Raises:
            OutOfMemory: if there are no sizes with which they can start.
            WorkerDied: if a process dies.
        """
        return (await self.sizes.start(self.processes))[0].load_s

    async def prepare(self) -> None:
        """Compiles for the sizes in force, where they have changed."""
        await asyncio.gather(*map(self.sizes.prepare, self.processes))

    # --- samplers

    async def probe(self, prompts: Sequence[Prompt]) -> float:
        """Difference of samplers and learner under a random adapter: `parity.probe_statistic`.

        Raises:
            ParityError: if they are not the same policy.
        """
        work = parity.check_probe(
            self._samplers,
            self.learner,
            prompts,
            bound=self._probe_bound,
            temperature=self._temperature,
            max_new_tokens=self._max_new_tokens,
        )
        return await self._within(None, work, aborts=self._samplers)

    async def publish(self, which: AdapterRef = "current") -> Published:
        """Loads an adapter of the learner into the samplers.

        If a sampler did not stop after an abort, generation ends and no adapter is loaded.
        """
        self.published = await self.learner.publish(which)
        if not self._stuck:
            await parity.sync(self._samplers, self.published)
        return self.published

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        cut_off: float | None = None,
        deadline: WorkDeadline | None = None,
        report: Report | None = None,
    ) -> tuple[list[Completion], DecodeWork]:
        """One completion per request, in their order, under the published adapter.

        Args:
            requests: of one phase.
            temperature: 0 is greedy.
            cut_off: see `dispatch.generate`.
            deadline: when the work is abandoned.
            report: receives rollouts soon after they end.

        Raises:
            Interrupted: if the run is stopped.
            OutOfTime: at the deadline.
        """
        await asyncio.gather(*map(self.sizes.prepare, self.sampler_processes))
        work = dispatch.generate(
            self._samplers, requests, temperature=temperature, cut_off=cut_off, report=report
        )
        completions, done = await self._within(deadline, work, aborts=self._samplers)
        assert self.published is not None
        parity.check_labels(completions, self.published)
        if requests and requests[0].name.phase != "train":
            self.evaluation_tokens += done.tokens
        return completions, done

    # --- rewards

    async def score(
        self,
        inputs: Sequence[RewardInput],
        *,
        deadline: WorkDeadline | None = None,
        early: EarlyScoring | None = None,
    ) -> list[dict[str, Outcome]]:
        """The outcome of each reward function for each input.

        Args:
            inputs: finished completions.
            deadline: when the work is abandoned.
            early: has the scores of some of them.

        Raises:
            Interrupted: if the run is stopped.
            OutOfTime: at the deadline.
        """
        work = self.scorer.score(inputs) if early is None else early.outcomes(inputs)
        return await self._within(deadline, work)

    # --- learner

    async def update(
        self, data: TrainingStep, step: TrainStep, left: RemainingTime
    ) -> dict[str, float]:
        """Updates the policy; returns the metrics of the update."""
        await self.sizes.prepare(self.learner_process)
        if isinstance(data, RolloutStep):
            metrics = await self.learner.update(
                data.rollouts, rate=step.rate, lr=step.lr, kl_coef=step.kl_coef
            )
            self.sizes.step_done(data.rollouts, left)
        else:
            metrics = await self.learner.sft_update(data.sequences)
            self.sizes.step_done((), left)
        return metrics

    async def save(self, meta: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint with `meta` and the sizes in force."""
        await self.learner.save({**meta, **self.sizes.meta})
        self._saving = self.sizes.in_force

    async def saved(self, *, wait: bool) -> float | None:
        """Seconds until the last checkpoint was complete; None: it is not, or there is none.

        Args:
            wait: until it is complete.
        """
        if self._saving is None:
            return None
        seconds = await self.learner.saved(wait=wait)
        if seconds is not None:
            self.sizes.checkpointed(self._saving)
            self._saving = None
        return seconds

    # --- use of time and memory

    async def uses(self) -> dict[str, ProcessUse]:
        """What each process does with its time and memory, by name: learner, `sampler 0`, ...

        The reward processes are `reward NAME 0`, ...; they report their time only. A process that
        does not answer, because it is stuck or dead, has an empty report, and is not waited for
        again until it has answered.
        """
        work = {name: self._use_of(name) for name in self.reporting}
        work["rewards"] = self._use_of_rewards()
        new = dict[str, asyncio.Future[dict[str, ProcessUse]]]()
        for name, one in work.items():
            if name in self._asked:
                one.close()
            else:
                new[name] = asyncio.ensure_future(one)
        self._asked |= new
        if new:
            await asyncio.wait(new.values(), timeout=ANSWER_S)
        uses = dict[str, ProcessUse]()
        for name in work:
            uses |= self._answer(name)
        return uses

    def _answer(self, name: str) -> dict[str, ProcessUse]:
        """The reports of a process that has answered; an empty one if it has not."""
        task = self._asked[name]
        if task.done():
            del self._asked[name]
            if not isinstance(task.exception(), RuntimeError):  # dead: its next call raises
                return task.result()
        return {name: ProcessUse()} if name in self.reporting else {}

    async def _use_of(self, name: str) -> dict[str, ProcessUse]:
        return {name: await self.reporting[name].use()}

    async def _use_of_rewards(self) -> dict[str, ProcessUse]:
        busy = await self.scorer.busy()
        return {
            f"reward {name}": ProcessUse([Span("scoring", *time) for time in times])
            for name, times in busy.items()
        }

    async def start_traces(self, folder: Path) -> dict[str, str]:
        """Begins a trace of each process in a folder of its own below `folder`; see `_of_each`."""
        return await self._of_each(
            lambda name, process: process.start_trace(str(folder / name.replace(" ", "_")))
        )

    async def stop_traces(self) -> dict[str, str]:
        """Writes the traces; see `_of_each`."""
        return await self._of_each(lambda _, process: process.stop_trace())

    async def _of_each(self, call: Callable[[str, Process], Awaitable[None]]) -> dict[str, str]:
        """Calls samplers and learner; the errors, by name: a trace must not end the run."""

        async def of(name: str, process: Process) -> str | None:
            try:
                await asyncio.wait_for(call(name, process), TRACE_S)
            except TimeoutError:
                return f"it did not answer in {TRACE_S:.0f} s"
            except (RuntimeError, OSError) as error:
                return str(error)
            return None

        found = await asyncio.gather(*(of(*item) for item in self.reporting.items()))
        pairs = zip(self.reporting, found, strict=True)
        return {name: error for name, error in pairs if error is not None}

    # --- stop signal and time limit

    def raise_if_stopped(self) -> None:
        """Ends the run between two pieces of work.

        Raises:
            Interrupted: if the run is stopped.
        """
        if self._stop.is_set():
            raise Interrupted

    async def _within(
        self,
        deadline: WorkDeadline | None,
        work: Coroutine[Any, Any, T],
        *,
        aborts: Sequence[Sampler] = (),
    ) -> T:
        """The result of `work`, abandoned at the deadline or when the run is stopped.

        Args:
            deadline: None: there is none.
            work: not started if the run is stopped or the deadline has passed.
            aborts: samplers to abort; they get some time to stop.

        Raises:
            Interrupted: if the run is stopped.
            OutOfTime: at the deadline.
        """
        now_s = self._clock.elapsed_s
        patience_s = None if deadline is None else max(0.0, deadline.until_s - now_s)
        if self._stop.is_set() or patience_s == 0 or (aborts and self._stuck):
            work.close()
            raise Interrupted if self._stop.is_set() else OutOfTime
        task, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait(
                {task, stopped}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
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
        most_s = STOPPING_S
        if deadline is not None and not self._stop.is_set():
            most_s = min(most_s, deadline.stopping_s(self._clock.elapsed_s))
        try:
            await asyncio.wait_for(stopping, most_s if aborts else 0)
        except TimeoutError:
            self._stuck = bool(aborts)
        if self._stop.is_set():
            self._stuck = bool(aborts)
            raise Interrupted
        if not self._stuck:
            await asyncio.gather(*(sampler.resume() for sampler in aborts))
        raise OutOfTime
