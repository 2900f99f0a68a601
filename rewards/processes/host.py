"""Scores completions with the reward functions of a run, each in processes of its own.

    inputs -> queue of each function -> its processes -> outcomes

    a score or an error of the function   final
    a death or a time-out                 repeated once, alone, in a fresh process; the second is
                                          the input's error

Functions run concurrently. A function of one completion is never called again for an input that has
a score. Independent of Ray; needs a running event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Container, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from configs.task import CONCURRENCY, RewardFunction, Rewards
from rewards.base import Outcome, RewardFacts, RewardInput
from rewards.processes.log import RewardLog
from rewards.processes.process import Job, ProcessEnded, RewardProcess
from rewards.processes.worker import Settings

MAX_FAILURES_IN_A_ROW = 3
"""Completions of a prompt, or prompts, that may fail in a row before others are given up."""
_CHUNK = 256
"""Inputs of a batch function that are sent to a process at a time."""
_SILENCE_S = 5.0
"""Seconds that an async process may be silent after the time limit of a call."""


class RewardHost(AbstractAsyncContextManager["RewardHost"]):
    """The processes of all reward functions; as a context manager it ends them.

    The log receives output and errors of the functions.
    """

    def __init__(self, rewards: Rewards, *, log: RewardLog) -> None:
        self.log = log
        self._parts = [_Part(part, rewards, log) for part in rewards.functions]

    async def start(self) -> list[RewardFacts]:
        """Starts all processes; returns what they report, by function; raises as `check`."""
        started = await asyncio.gather(
            *(part.start() for part in self._parts), return_exceptions=True
        )
        mistakes = [f"rewards.functions: {one}" for one in started if isinstance(one, ValueError)]
        if mistakes:
            raise ValueError("\n".join(mistakes))
        facts = []
        for one in started:
            if isinstance(one, BaseException):
                raise one
            facts.append(one)
        return facts

    async def score(
        self, inputs: Sequence[RewardInput], *, without: Container[str] = ()
    ) -> list[dict[str, Outcome]]:
        """The outcome of each function but those `without`, by name, for each input."""
        parts = [part for part in self._parts if part.name not in without]
        scored = await asyncio.gather(*(part.score(inputs) for part in parts))
        return [
            {part.name: outcomes[index] for part, outcomes in zip(parts, scored, strict=True)}
            for index in range(len(inputs))
        ]

    def busy_s(self) -> dict[str, float]:
        """Seconds that the processes of each function have scored since the last call, summed."""
        found = {part.name: part.busy_s for part in self._parts}
        for part in self._parts:
            part.busy_s = 0.0
        return found

    @property
    def quiet_s(self) -> float | None:
        """Seconds since the last call ended, or began; None: no call is waited for."""
        moved_s = [part.moved_s for part in self._parts if part.scoring]
        return time.monotonic() - max(moved_s) if moved_s else None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(part.close() for part in self._parts))


def check(rewards: Rewards) -> list[RewardFacts]:
    """Starts a process for each function and ends it; returns what they report.

    Raises:
        ValueError: with a line for each function that cannot be used.
    """

    async def started() -> list[RewardFacts]:
        async with RewardHost(rewards.single_process(), log=RewardLog(None)) as host:
            return await host.start()

    return asyncio.run(started())


class _Part:
    """The queue and the processes of one function.

    Attributes:
        busy_s: seconds that its processes have scored since the host was asked, summed.
        scoring: number of processes that score.
        moved_s: when a call last ended or began, on the monotonic clock.
    """

    def __init__(self, part: RewardFunction, rewards: Rewards, log: RewardLog) -> None:
        self.name = part.name
        self._concurrency = part.concurrency
        self._settings = Settings(
            function=part.function,
            args=part.args,
            timeout_s=part.timeout_s or rewards.timeout_s,
            memory_bytes=int(rewards.memory_gib * 2**30),
        )
        self._log = log
        self._facts: RewardFacts | None = None
        self._waiting: deque[Job] = deque()
        self._alone: deque[Job] = deque()
        self._failures: Counter[int] = Counter()
        self._wake = asyncio.Event()
        self._processes: list[RewardProcess | None] = [None] * (part.workers or rewards.workers)
        self._tasks: list[asyncio.Task[None]] = []
        self.busy_s, self.scoring, self.moved_s = 0.0, 0, 0.0

    async def start(self) -> RewardFacts:
        """Starts the processes; raises ValueError if the function cannot be used."""
        indices = range(len(self._processes))
        try:
            first, *_ = await asyncio.gather(*map(self._start, indices))
            facts = RewardFacts(self.name, **first.facts)
            if facts.kind != "async" and self._concurrency is not None:
                raise ValueError(
                    "concurrency has no effect: the function is not async; set workers instead"
                )
        except (ValueError, OSError) as error:
            raise ValueError(f"{self._settings.function}: {error}") from None
        self._facts = facts
        self._tasks = [asyncio.create_task(self._work(index)) for index in indices]
        return facts

    async def score(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """The outcomes of the inputs."""
        loop = asyncio.get_running_loop()
        jobs = [Job(given, loop.create_future()) for given in inputs]
        self._waiting += jobs
        self._wake.set()
        self._top_up()
        return list(await asyncio.gather(*(job.outcome for job in jobs)))

    async def close(self) -> None:
        """Ends the processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for index in range(len(self._processes)):
            await self._end(index)

    async def _work(self, index: int) -> None:
        """Serves the queues with one process at a time."""
        while True:
            jobs = _take(self._alone, 1) or _take(self._waiting, self._room())
            if not jobs:
                self._wake.clear()
                await self._wake.wait()
                continue
            began_s = self.moved_s = time.monotonic()
            self.scoring += 1
            try:
                await self._score(index, jobs)
            except Exception as error:  # noqa: BLE001 - raised where the outcomes are awaited
                process = self._processes[index]
                for job in (*jobs, *(process.jobs.values() if process else ())):
                    if not job.outcome.done():
                        job.outcome.set_exception(error)
                await self._end(index)
            finally:
                self.scoring -= 1
                self.busy_s += time.monotonic() - began_s

    @property
    def _is_async(self) -> bool:
        return self._facts is not None and self._facts.kind == "async"

    def _room(self) -> int:
        """Jobs that a process is sent at a time."""
        assert self._facts is not None
        if self._facts.kind == "sample":
            return 1
        if self._is_async:
            return self._concurrency or CONCURRENCY
        return min(-(-len(self._waiting) // len(self._processes)), _CHUNK)

    def _top_up(self) -> None:
        """Sends waiting jobs to the processes of an async function that score and have room."""
        for process in self._processes if self._is_async else ():
            # One that is fresh repeats a job alone.
            if process and process.jobs and not (process.fresh or process.dumps):
                process.send(_take(self._waiting, self._room() - len(process.jobs)))

    async def _score(self, index: int, jobs: Sequence[Job]) -> None:
        """Scores jobs with a process, which is replaced if it dies or takes too long."""
        process, alone = self._processes[index], jobs[0].is_repeated
        try:
            if process is None or (alone and not process.fresh):
                await self._end(index)
                process = await self._start(index)
        except (ValueError, OSError) as error:
            await self._end(index)
            failed = Outcome.failed("not_started", f"its process did not start: {error}")
            for job in jobs:
                self._settle(job, failed)
            return
        process.fresh = process.fresh and alone
        process.send(jobs)
        # The process of an async function limits the time of each call itself.
        limit_s = self._settings.timeout_s
        try:
            while process.jobs:
                async with asyncio.timeout(limit_s + (_SILENCE_S if self._is_async else 0.0)):
                    job, outcome, trace = await process.result()
                self.moved_s = time.monotonic()
                self._settle(job, outcome, trace)
                self._top_up()
            return
        except TimeoutError:
            await process.dump()
            lost = Outcome.failed("timed_out", f"took longer than {limit_s:g} s")
        except ProcessEnded as error:
            lost = Outcome.failed("died", str(error))
        left = list(process.jobs.values())
        await self._end(index)
        for job in left:
            self._settle(job, lost)

    def _settle(self, job: Job, outcome: Outcome, trace: str = "") -> None:
        """Finishes a job, or repeats it alone after its first death or time-out."""
        cause = outcome.error.cause if outcome.error else None
        if cause in {"died", "timed_out"} and not job.is_repeated:
            assert outcome.error is not None
            again = replace(outcome.error, message=f"{outcome.error.message}; repeated alone")
            self._log.error(self.name, job.given, again)
            job.is_repeated = True
            self._alone.append(job)
            self._wake.set()
            return
        self._finish(job, outcome, trace)
        if cause in {"died", "timed_out", "not_started"}:
            self._give_up(job.given.prompt_id, outcome)
        else:
            self._failures.clear()

    def _give_up(self, prompt: int, failed: Outcome) -> None:
        """Counts a failure; after several in a row, fails the jobs that would fail alike.

        The rollouts of a prompt often fail for the same reason, so that failures of one prompt give
        up only this prompt, and those of several prompts all that wait.
        """
        assert failed.error is not None
        self._failures[prompt] += 1
        waiting, why = [*self._alone, *self._waiting], "prompts in a row"
        if len(self._failures) < MAX_FAILURES_IN_A_ROW:
            if self._failures[prompt] < MAX_FAILURES_IN_A_ROW:
                return
            waiting = [one for one in waiting if one.given.prompt_id == prompt]
            why = "completions of the prompt"
        self._failures.clear()
        what = f"given up after failures of {MAX_FAILURES_IN_A_ROW} {why}: {failed.error.message}"
        for one in waiting:
            self._finish(one, Outcome.failed(failed.error.cause, what))

    def _finish(self, job: Job, outcome: Outcome, trace: str = "") -> None:
        """Sets the outcome of a job."""
        if outcome.error is not None:
            self._log.error(self.name, job.given, outcome.error, trace)
        if not job.outcome.done():  # cancelled: nobody waits for it
            job.outcome.set_result(outcome)

    async def _start(self, index: int) -> RewardProcess:
        process = RewardProcess(self._settings, name=self.name, log=self._log)
        self._processes[index] = process
        await process.start()
        if self._facts is not None and process.facts["sha256"] != self._facts.sha256:
            raise ValueError("its file has changed since the run was started")
        return process

    async def _end(self, index: int) -> None:
        process, self._processes[index] = self._processes[index], None
        if process is not None:
            await process.kill()


def _take(queue: deque[Job], most: int) -> list[Job]:
    """The next jobs of a queue, without those that were given up or that nobody waits for."""
    taken: list[Job] = []
    while queue and len(taken) < most:
        job = queue.popleft()
        if not job.outcome.done():
            taken.append(job)
    return taken
