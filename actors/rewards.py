"""Reward functions in processes of their own, so that one that hangs or dies can be replaced.

An error is not a zero: whatever ends without a number is an outcome without a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from configs.schema import Rewards
from rewards.base import Outcome, RewardInput, describe_error, printable, score
from rewards.resolve import resolve

GIVE_UP_AFTER = 3
"""Inputs of one batch that may fail alone, one after the other, before the rest is given up."""

RESTART_TIMEOUT_S = 300.0
"""How long a process that replaces another one may take to import the reward functions."""


class RewardActor:
    """A plain class; `actors.handles` makes a Ray actor of it."""

    def __init__(self, config: Rewards) -> None:
        self.config = config

    def start(self) -> None:
        """Imports the reward functions.

        Raises:
            ValueError: if one of them is not there.
        """
        self.functions = {part.name: resolve(part.function) for part in self.config.functions}

    def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """One outcome for each input; whatever the function does short of hanging."""
        return score(self.functions[name], inputs)


class Worker(Protocol):
    """A reward process as the pool sees it."""

    async def start(self) -> None:
        """Returns when the process is ready."""

    async def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """See `RewardActor.score`. Raises `WorkerDied` if there is no answer."""

    def kill(self) -> None:
        """Ends the process at once."""


class WorkerDied(Exception):  # noqa: N818  # says what happened
    """The process ended while it was scoring, or did not answer as it should."""


class RewardPool:
    """Scores a step's completions on several workers.

    Args:
        config: functions, number of workers, time limit of a call.
        spawn: starts a worker process.
    """

    def __init__(self, config: Rewards, spawn: Callable[[], Worker]) -> None:
        self._config = config
        self._spawn = spawn
        # None: the process was ended; the next call starts another one.
        self._workers: list[Worker | None] = [spawn() for _ in range(config.workers)]

    async def start(self) -> None:
        """Waits until all workers are ready.

        Raises:
            ValueError: if a reward function is not there.
        """
        await asyncio.gather(*(worker.start() for worker in self._workers if worker is not None))

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """For each input the outcome of each function, by its name."""
        share = -(-len(inputs) // len(self._workers))
        scored = await asyncio.gather(
            *(
                self._score_share(number, inputs[number * share : (number + 1) * share])
                for number in range(len(self._workers))
            )
        )
        return [row for part in scored for row in part]

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            if worker is not None:
                worker.kill()

    async def _score_share(
        self, number: int, inputs: Sequence[RewardInput]
    ) -> list[dict[str, Outcome]]:
        if not inputs:
            return []
        by_part = {
            part.name: await self._score_part(number, part.name, inputs)
            for part in self._config.functions
        }
        return [
            {name: outcomes[row] for name, outcomes in by_part.items()}
            for row in range(len(inputs))
        ]

    async def _score_part(
        self, number: int, name: str, inputs: Sequence[RewardInput]
    ) -> list[Outcome]:
        outcomes = await self._call(number, name, inputs)
        if not isinstance(outcomes, str):
            return outcomes
        if len(inputs) == 1:
            return [Outcome(None, outcomes)]
        # Somebody in the batch is at fault; find out who, so that the others keep their scores.
        alone: list[Outcome] = []
        failures = 0
        for one in inputs:
            found = outcomes if failures >= GIVE_UP_AFTER else await self._call(number, name, [one])
            if isinstance(found, str):
                failures += 1
                alone.append(Outcome(None, found))
            else:
                failures = 0
                alone += found
        return alone

    async def _call(
        self, number: int, name: str, inputs: Sequence[RewardInput]
    ) -> list[Outcome] | str:
        """The outcomes, or what happened to the process; the next call replaces it then."""
        try:
            worker = self._workers[number] or await self._restart(number)
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            return printable(f"its process did not start: {describe_error(error)}")
        try:
            return await asyncio.wait_for(worker.score(name, inputs), self._config.timeout_s)
        except TimeoutError:
            problem = f"took longer than {self._config.timeout_s:g} s"
        except WorkerDied:
            problem = "its process died"
        worker.kill()
        self._workers[number] = None
        return problem

    async def _restart(self, number: int) -> Worker:
        """A new process in the place of one that was ended.

        Raises:
            Exception: if it does not start.
        """
        worker = self._spawn()
        try:
            await asyncio.wait_for(worker.start(), RESTART_TIMEOUT_S)
        except BaseException:
            worker.kill()
            raise
        self._workers[number] = worker
        return worker
