"""Reward functions in separate processes, so that one that hangs or dies can be replaced.

An error is not a zero: a call that fails gives an outcome without a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from configs.schema import Rewards
from rewards.base import Outcome, RewardInput, describe_error, printable, score
from rewards.resolve import resolve

MAX_CONSECUTIVE_FAILURES = 3
"""Single inputs of one batch that may fail in a row before the remaining ones are marked failed."""

RESTART_TIMEOUT_S = 300.0
"""Time limit for a replacement process to import the reward functions."""


class RewardActor:
    """Runs the reward functions; a plain class that `actors.handles` runs as a Ray actor."""

    def __init__(self, config: Rewards) -> None:
        self.config = config

    def start(self) -> None:
        """Imports the reward functions.

        Raises:
            ValueError: if one of them cannot be imported.
        """
        self.functions = {part.name: resolve(part.function) for part in self.config.functions}

    def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """Returns one outcome per input, also if the function raises; it may hang or die."""
        return score(self.functions[name], inputs)


class RewardWorker(Protocol):
    """A reward process as the pool sees it."""

    async def start(self) -> None:
        """Imports the reward functions."""

    async def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """See `RewardActor.score`.

        Raises:
            WorkerDied: if the process ended without an answer.
        """

    def kill(self) -> None:
        """Ends the process at once."""


class WorkerDied(Exception):  # noqa: N818  # the pool handles it
    """The process ended, or was interrupted, while it was scoring."""


class RewardPool:
    """Scores a step's completions on several reward processes.

    Args:
        config: functions, number of workers, time limit of a call.
        spawn: starts a worker process.
    """

    def __init__(self, config: Rewards, spawn: Callable[[], RewardWorker]) -> None:
        self._config = config
        self._spawn = spawn
        # None: the process was ended; the next call starts a new one.
        self._workers: list[RewardWorker | None] = [spawn() for _ in range(config.workers)]

    async def start(self) -> None:
        """Waits until all workers are ready.

        Raises:
            ValueError: if a reward function cannot be imported.
        """
        await asyncio.gather(*(worker.start() for worker in self._workers if worker is not None))

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """Returns for each input the outcome of each function, by name."""
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
        # Score each input alone to find the failing ones, so that the others keep their scores.
        single: list[Outcome] = []
        failures = 0
        for one in inputs:
            found = (
                outcomes
                if failures >= MAX_CONSECUTIVE_FAILURES
                else await self._call(number, name, [one])
            )
            if isinstance(found, str):
                failures += 1
                single.append(Outcome(None, found))
            else:
                failures = 0
                single += found
        return single

    async def _call(
        self, number: int, name: str, inputs: Sequence[RewardInput]
    ) -> list[Outcome] | str:
        """Returns the outcomes, or why the process failed; the next call then replaces it."""
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

    async def _restart(self, number: int) -> RewardWorker:
        """Starts a new process in place of one that was ended.

        Raises:
            Exception: if the new process does not start.
        """
        worker = self._spawn()
        try:
            await asyncio.wait_for(worker.start(), RESTART_TIMEOUT_S)
        except BaseException:
            worker.kill()
            raise
        self._workers[number] = worker
        return worker
