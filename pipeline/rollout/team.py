"""Samplers, learner and scorer under one command: hashes are checked, work ends when told to.

Knows who does what, not what it is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef, Published
from pipeline.contracts.rollouts import Completion, DecodeWork, Prompt, RolloutRequest
from pipeline.contracts.workers import Learner, Sampler, Scorer
from pipeline.rollout import dispatch, parity

T = TypeVar("T")

ABORT_PATIENCE_S = 30.0
"""How long a sampler may take to notice that it was told to stop, at most."""


class Interrupted(Exception):  # noqa: N818  # not an error: the user asked for it
    """A signal arrived; what was in flight is abandoned."""


class TrainingStopped(Exception):  # noqa: N818  # not an error of ours: the message says whose
    """The run learns nothing as it is and needs its user."""


class OutOfTime(Exception):  # noqa: N818  # not an error: something else needs what time is left
    """What was in flight took too long and was abandoned."""


@dataclass
class Workers:
    """Whom the coordinator commands."""

    samplers: Sequence[Sampler]
    learner: Learner
    scorer: Scorer


class Team:
    """The workers and the adapter that is in force among them.

    Args:
        workers: who does the work.
        config: bounds of parity, temperature of the probe.
        stop: set from outside to end early.
        patience_s: how long work may be waited for that can be abandoned; asked when it is begun.
        ending_s: how long work may be waited for that was abandoned; asked then.

    Attributes:
        work: what the samplers have computed for the last `generate`.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        config: Config,
        stop: asyncio.Event,
        patience_s: Callable[[], float | None] = lambda: None,
        ending_s: Callable[[], float] = lambda: ABORT_PATIENCE_S,
    ) -> None:
        self.samplers = workers.samplers
        self.learner = workers.learner
        self.scorer = workers.scorer
        self.bounds = parity.Bounds.of(config)
        self.stop = stop
        self.published: Published | None = None
        self.work = DecodeWork()
        self._config = config
        self._patience_s = patience_s
        self._ending_s = ending_s
        self._stuck = False

    async def probe(self, prompts: Sequence[Prompt]) -> float:
        """Largest log-prob difference between samplers and learner under a random adapter.

        Raises:
            ParityError: if they are not the same policy.
        """
        return await self.unless_stopped(
            parity.check_probe(
                self.samplers,
                self.learner,
                prompts,
                bound=self.bounds.probe,
                temperature=self._config.rollout.temperature,
            ),
            aborts=self.samplers,
        )

    async def publish(self, which: AdapterRef = "current") -> Published:
        """Brings an adapter of the learner to the samplers; it is in force from then on.

        Samplers that were told to end what they did draw nothing any more and get nothing.
        """
        self.published = await self.learner.publish(which)
        if not self._stuck:
            await parity.sync(self.samplers, self.published)
        return self.published

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        cut_off: float | None = None,
    ) -> list[Completion]:
        """One completion for each request, in their order, drawn under the adapter in force.

        With `cut_off` some of them may come back cut: see `pipeline.rollout.dispatch.generate`.
        """
        completions, self.work = await self.unless_stopped(
            dispatch.generate(
                self.samplers,
                requests,
                temperature=temperature,
                cut_off=cut_off,
            ),
            aborts=self.samplers,
        )
        assert self.published is not None
        parity.check_labels(completions, self.published)
        return completions

    def raise_if_stopped(self) -> None:
        """Ends the run between two pieces of work.

        Raises:
            Interrupted: if `stop` is set.
        """
        if self.stop.is_set():
            raise Interrupted

    async def unless_stopped(
        self, work: Coroutine[Any, Any, T], *, aborts: Sequence[Sampler] = ()
    ) -> T:
        """The result of `work`, abandoned if `stop` is set first or it takes too long.

        Args:
            work: what to do; not begun if `stop` is set already.
            aborts: samplers that are told, and get a while to end what they do.

        Raises:
            Interrupted: if it was abandoned because of `stop`.
            OutOfTime: if it was because of the time, or there was none left to begin with.
        """
        patience_s = self._patience_s()
        if self.stop.is_set() or patience_s == 0 or (aborts and self._stuck):
            work.close()
            raise Interrupted if self.stop.is_set() else OutOfTime
        task, stopped = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
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
        # What goes wrong while ending is of no interest: a sampler that is gone has ended.
        ending = asyncio.gather(
            task, *(sampler.abort() for sampler in aborts), return_exceptions=True
        )
        most_s = ABORT_PATIENCE_S if self.stop.is_set() else self._ending_s()
        try:
            await asyncio.wait_for(ending, min(ABORT_PATIENCE_S, most_s) if aborts else 0)
        except TimeoutError:
            self._stuck = bool(aborts)
        if self.stop.is_set():
            self._stuck = bool(aborts)
            raise Interrupted
        if not self._stuck:
            await asyncio.gather(*(sampler.resume() for sampler in aborts))
        raise OutOfTime
