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
from dataclasses import dataclass

from configs.task import CONCURRENCY, RewardFunction, Rewards
from rewards.base import Cause, Outcome, RewardError, RewardFacts, RewardInput, printable
from rewards.processes.log import RewardLog
from rewards.processes.process import ProcessEnded, RewardProcess
from rewards.processes.worker import Settings

MAX_FAILURES_IN_A_ROW = 3
"""Completions of a prompt, or prompts, that may fail in a row before others are given up."""
START_TIMEOUT_S = 300.0
"""Time limit for a process to import its function."""
_CHUNK = 256
"""Inputs of a batch function that are sent to a process at a time."""
_SILENCE_S = 5.0
"""Seconds that an async process may be silent after the time limit of a call."""


@dataclass(eq=False)
class _Job:
    """One input of one function.

    Attributes:
        number: its number in messages.
        given: the input.
        outcome: set when it is scored.
        is_repeated: whether it has had a death or a time-out.
    """

    number: int
    given: RewardInput
    outcome: asyncio.Future[Outcome]
    is_repeated: bool = False

    def finish(self, outcome: Outcome) -> None:
        """Sets the outcome."""
        if not self.outcome.done():  # cancelled: nobody waits for it
            self.outcome.set_result(outcome)


class RewardHost:
    """The processes of all reward functions.

    Args:
        rewards: functions, number of processes, limits.
        log: receives output and errors of the functions.
    """

    def __init__(self, rewards: Rewards, *, log: RewardLog) -> None:
        self.log = log
        self._parts = [_Part(part, rewards, log) for part in rewards.functions]

    async def start(self) -> list[RewardFacts]:
        """Starts all processes; returns what they report, by function.

        Raises:
            ValueError: with a line for each function that cannot be used.
        """
        started = await asyncio.gather(
            *(part.start() for part in self._parts), return_exceptions=True
        )
        facts, mistakes = [], []
        for one in started:
            if isinstance(one, RewardFacts):
                facts.append(one)
            elif isinstance(one, ValueError):
                mistakes.append(f"rewards.functions: {one}")
            else:
                raise one
        if mistakes:
            await self.close()
            raise ValueError("\n".join(mistakes))
        return facts

    async def score(
        self, inputs: Sequence[RewardInput], *, without: Container[str] = ()
    ) -> list[dict[str, Outcome]]:
        """The outcome of each function for each input, by name; may be called concurrently.

        Args:
            inputs: the completions.
            without: names of functions that are not called.
        """
        parts = [part for part in self._parts if part.name not in without]
        scored = await asyncio.gather(*(part.score(inputs) for part in parts))
        return [
            {part.name: outcomes[index] for part, outcomes in zip(parts, scored, strict=True)}
            for index in range(len(inputs))
        ]

    def busy_s(self) -> dict[str, float]:
        """Seconds that the processes of each function have scored since the last call, summed."""
        return {part.name: part.take_busy_s() for part in self._parts}

    @property
    def quiet_s(self) -> float | None:
        """Seconds since the last call ended, or began; None: no call is waited for."""
        return min((part.quiet_s for part in self._parts if part.is_busy), default=None)

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(part.close() for part in self._parts))


def check(rewards: Rewards) -> list[RewardFacts]:
    """Starts a process for each function and ends it; returns what they report.

    Raises:
        ValueError: with a line for each function that cannot be used.
    """

    async def started() -> list[RewardFacts]:
        host = RewardHost(rewards.single_process(), log=RewardLog(None))
        try:
            return await host.start()
        finally:
            await host.close()

    return asyncio.run(started())


class _Part:
    """The queue and the processes of one function."""

    def __init__(self, part: RewardFunction, rewards: Rewards, log: RewardLog) -> None:
        self.name = part.name
        self._timeout_s = part.timeout_s or rewards.timeout_s
        self._concurrency = part.concurrency
        self._settings = Settings(
            function=part.function,
            args=part.args,
            timeout_s=self._timeout_s,
            memory_bytes=int(rewards.memory_gib * 2**30),
        )
        self._log = log
        self._facts: RewardFacts | None = None
        self._count = 0
        self._waiting: deque[_Job] = deque()
        self._alone: deque[_Job] = deque()
        self._failures: Counter[int] = Counter()
        self._wake = asyncio.Event()
        count = part.workers or rewards.workers
        self._processes: list[RewardProcess | None] = [None] * count
        self._open: list[dict[int, _Job]] = [{} for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self._busy_s, self._scoring, self._moved_s = 0.0, 0, time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether a process scores."""
        return self._scoring > 0

    @property
    def quiet_s(self) -> float:
        """Seconds since a call ended, or began."""
        return time.monotonic() - self._moved_s

    def take_busy_s(self) -> float:
        """See `RewardHost.busy_s`."""
        found, self._busy_s = self._busy_s, 0.0
        return found

    async def start(self) -> RewardFacts:
        """Starts the processes.

        Raises:
            ValueError: if the function cannot be used.
        """
        indices = range(len(self._processes))
        started = await asyncio.gather(*map(self._start, indices), return_exceptions=True)
        try:
            for one in started:
                if isinstance(one, BaseException):
                    raise one
            assert isinstance(started[0], RewardProcess)
            facts = RewardFacts(self.name, **started[0].facts)
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
        jobs = []
        for given in inputs:
            self._count += 1
            jobs.append(_Job(self._count, given, loop.create_future()))
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
            repeated = _take(self._alone, 1)
            jobs = repeated or _take(self._waiting, self._room())
            if not jobs:
                self._wake.clear()
                await self._wake.wait()
                continue
            began_s = self._moved_s = time.monotonic()
            self._scoring += 1
            try:
                await self._score(index, jobs, alone=bool(repeated))
            except Exception as error:  # noqa: BLE001 - raised where the outcomes are awaited
                for job in (*jobs, *self._open[index].values()):
                    if not job.outcome.done():
                        job.outcome.set_exception(error)
                await self._end(index)
            finally:
                self._scoring -= 1
                self._busy_s += time.monotonic() - began_s

    def _room(self) -> int:
        """Inputs that a process is sent at a time."""
        assert self._facts is not None
        if self._is_async:
            return self._concurrency or CONCURRENCY
        share = -(-len(self._waiting) // len(self._processes))
        return 1 if self._facts.kind == "sample" else min(share, _CHUNK)

    @property
    def _is_async(self) -> bool:
        return self._facts is not None and self._facts.kind == "async"

    def _top_up(self) -> None:
        """Sends waiting inputs to the processes of an async function that score and have room."""
        for process, scored in zip(self._processes, self._open, strict=True):
            # One that is fresh repeats an input alone.
            if self._is_async and process and scored and not (process.fresh or process.dumps):
                self._send(process, _take(self._waiting, self._room() - len(scored)), scored)

    def _send(self, process: RewardProcess, jobs: Sequence[_Job], scored: dict[int, _Job]) -> None:
        if jobs:
            scored |= {job.number: job for job in jobs}
            process.send([(job.number, job.given) for job in jobs])

    async def _score(self, index: int, jobs: Sequence[_Job], *, alone: bool) -> None:
        """Scores jobs with a process, which is replaced if it dies or takes too long."""
        scored = self._open[index] = {}
        process = self._processes[index]
        try:
            if process is None or (alone and not process.fresh):
                await self._end(index)
                process = await self._start(index)
        except (ValueError, OSError) as error:
            for job in jobs:
                self._fail(job, "not_started", f"its process did not start: {error}")
            return
        process.fresh = process.fresh and alone
        self._send(process, jobs, scored)
        try:
            while scored:
                await self._receive(process, scored)
                self._top_up()
        except TimeoutError:
            await process.dump()
            problem: tuple[Cause, str] = "timed_out", f"took longer than {self._timeout_s:g} s"
        except ProcessEnded as error:
            problem = "died", str(error)
        else:
            return
        await self._end(index)
        self._repeat(list(scored.values()), *problem)

    async def _receive(self, process: RewardProcess, scored: dict[int, _Job]) -> None:
        """Takes the next answer.

        Raises:
            TimeoutError: at the time limit of a call.
            ProcessEnded: if the process has ended.
        """
        patience_s = self._timeout_s + (_SILENCE_S if self._is_async else 0.0)
        async with asyncio.timeout(patience_s):
            number, value, error, named, trace = await process.answer()
        self._moved_s = time.monotonic()
        process.pass_output()
        job = scored.pop(number)
        if error is not None:
            error = RewardError(*error)
            if error.cause == "timed_out":
                self._repeat([job], error.cause, error.message)
                return
            self._log.error(self.name, [job.given], error, trace)
        self._failures.clear()
        job.finish(Outcome(value, error, named))

    def _repeat(self, jobs: Sequence[_Job], cause: Cause, problem: str) -> None:
        """Repeats jobs of a process that died or took too long alone; the second time they fail."""
        first = [job for job in jobs if not job.is_repeated]
        if first:
            again = RewardError(cause, f"{problem}; repeated alone")
            self._log.error(self.name, [job.given for job in first], again, "")
        for job in jobs:
            if job.is_repeated:
                self._fail(job, cause, problem)
            else:
                job.is_repeated = True
                self._alone.append(job)
        self._wake.set()

    def _fail(self, job: _Job, cause: Cause, problem: str) -> None:
        """Fails a job; gives up those that would fail alike.

        The rollouts of a prompt often fail for the same reason, so that failures of one prompt give
        up only this prompt, and those of several prompts all that wait.
        """
        self._finish([job], cause, problem)
        prompt = job.given.prompt_id
        self._failures[prompt] += 1
        waiting, why = [*self._alone, *self._waiting], "prompts in a row"
        if len(self._failures) < MAX_FAILURES_IN_A_ROW:
            if self._failures[prompt] < MAX_FAILURES_IN_A_ROW:
                return
            waiting = [one for one in waiting if one.given.prompt_id == prompt]
            why = "completions of the prompt"
        self._failures.clear()
        what = f"given up after failures of {MAX_FAILURES_IN_A_ROW} {why}: {problem}"
        self._finish(waiting, cause, what)

    def _finish(self, jobs: Sequence[_Job], cause: Cause, problem: str) -> None:
        """Sets an error as the outcome of jobs."""
        error = RewardError(cause, printable(problem))
        if jobs:
            self._log.error(self.name, [job.given for job in jobs], error, "")
        for job in jobs:
            job.finish(Outcome(None, error))

    async def _start(self, index: int) -> RewardProcess:
        """Starts a process; see `RewardProcess.start`."""

        def output(text: str) -> None:
            inputs = [job.given for job in self._open[index].values()]
            what = "it is interrupted here" if process.dumps else "output"
            self._log.output(self.name, inputs, text, what=what)

        process = RewardProcess(self._settings, output=output)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.start()
            if self._facts is not None and process.facts["sha256"] != self._facts.sha256:
                raise ValueError("its file has changed since the run was started")
        except TimeoutError:
            await process.kill()
            raise ProcessEnded(f"importing it took longer than {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await process.kill()
            raise
        self._processes[index] = process
        return process

    async def _end(self, index: int) -> None:
        process, self._processes[index] = self._processes[index], None
        if process is not None:
            await process.kill()


def _take(queue: deque[_Job], most: int) -> list[_Job]:
    """The next jobs of a queue, without those that were given up or that nobody waits for."""
    taken: list[_Job] = []
    while queue and len(taken) < most:
        job = queue.popleft()
        if not job.outcome.done():
            taken.append(job)
    return taken
