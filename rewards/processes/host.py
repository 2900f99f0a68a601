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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from configs.task import CONCURRENCY, RewardFunction, Rewards
from rewards.base import Cause, Outcome, RewardError, RewardFacts, RewardInput, printable
from rewards.processes.log import RewardLog
from rewards.processes.process import ProcessEnded, RewardProcess
from rewards.processes.worker import TIMED_OUT, Settings

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
        failures: deaths and time-outs so far.
    """

    number: int
    given: RewardInput
    outcome: asyncio.Future[Outcome]
    failures: int = 0

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
                mistakes.append(str(one))
            else:
                raise one
        if mistakes:
            await self.close()
            raise ValueError("\n".join(f"rewards.functions: {mistake}" for mistake in mistakes))
        return facts

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """The outcome of each function for each input, by name; may be called concurrently."""
        scored = await asyncio.gather(*(part.score(inputs) for part in self._parts))
        names = [part.name for part in self._parts]
        return [dict(zip(names, row, strict=True)) for row in zip(*scored, strict=True)]

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
        self._function = part.function
        self._timeout_s = part.timeout_s or rewards.timeout_s
        self._concurrency = part.concurrency
        self._settings = Settings(
            function=part.function,
            args=part.args,
            timeout_s=self._timeout_s,
            memory_bytes=int(rewards.memory_gib * 2**30),
            concurrency=part.concurrency or CONCURRENCY,
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
        try:
            # The first alone: a function that cannot be used is imported once, or twice if that
            # ends its process, which can have other reasons.
            try:
                first = await self._started(0)
            except ProcessEnded:
                first = await self._started(0)
            self._processes[0] = first
            self._facts = RewardFacts(self.name, **first.facts)
            if self._facts.kind != "async" and self._concurrency is not None:
                raise ValueError(
                    "concurrency has no effect: the function is not async; set workers instead"
                )
            others = range(1, len(self._processes))
            # One that ends here is started again for its first inputs.
            await asyncio.gather(*map(self._open_process, others))
        except (ValueError, OSError, ProcessEnded) as error:
            raise ValueError(f"{self._function}: {error}") from None
        self._tasks = [asyncio.create_task(self._work(n)) for n in range(len(self._processes))]
        return self._facts

    async def _open_process(self, index: int) -> None:
        with suppress(ProcessEnded):
            self._processes[index] = await self._started(index)

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
        """Serves the queue with one process at a time."""
        while True:
            for alone in (True, False):
                jobs = self._take(alone=alone)
                if jobs:
                    break
            else:
                self._wake.clear()
                await self._wake.wait()
                continue
            began_s = self._moved_s = time.monotonic()
            self._scoring += 1
            try:
                await self._score(index, jobs, alone=alone)
            except Exception as error:  # noqa: BLE001 - raised where the outcomes are awaited
                for job in (*jobs, *self._open[index].values()):
                    if not job.outcome.done():
                        job.outcome.set_exception(error)
                await self._end(index)
            finally:
                self._scoring -= 1
                self._busy_s += time.monotonic() - began_s

    def _top_up(self) -> None:
        """Sends waiting inputs to the processes of an async function that score and have room."""
        for process, scored in zip(self._processes, self._open, strict=True):
            # One that is fresh repeats an input alone.
            if process is None or process.fresh or process.dumps or not scored:
                continue
            more = self._take(alone=False, room=self._async_room - len(scored))
            if more:
                process.send([(job.number, job.given) for job in more])
                scored |= {job.number: job for job in more}

    def _take(self, *, alone: bool, room: int | None = None) -> list[_Job]:
        """The next jobs for a process; those that nobody waits for are dropped."""
        queue = self._alone if alone else self._waiting
        if room is None:
            assert self._facts is not None
            share = -(-len(queue) // len(self._processes))
            one_by_one = alone or self._facts.kind == "sample"
            room = 1 if one_by_one else self._async_room or min(share, _CHUNK)
        taken: list[_Job] = []
        while queue and len(taken) < room:
            job = queue.popleft()
            if not job.outcome.done():
                taken.append(job)
        return taken

    async def _score(self, index: int, jobs: Sequence[_Job], *, alone: bool) -> None:
        """Scores jobs with a process, which is replaced if it dies or takes too long."""
        open_jobs = self._open[index] = {job.number: job for job in jobs}
        process = self._processes[index]
        try:
            if process is None or (alone and not process.fresh):
                await self._end(index)
                process = self._processes[index] = await self._started(index)
        except (ValueError, OSError, ProcessEnded) as error:
            for job in jobs:
                self._fail(job, "not_started", f"its process did not start: {error}")
            return
        process.fresh = process.fresh and alone
        try:
            process.send([(job.number, job.given) for job in jobs])
            while open_jobs:
                await self._receive(process, open_jobs)
                self._top_up()
        except TimeoutError:
            await process.dump()
            problem: tuple[Cause, str] = "timed_out", f"took longer than {self._timeout_s:g} s"
        except ProcessEnded as error:
            problem = "died", str(error)
        else:
            return
        await self._end(index)
        self._retry(list(open_jobs.values()), *problem)

    async def _receive(self, process: RewardProcess, open_jobs: dict[int, _Job]) -> None:
        """Takes the next answer.

        Raises:
            TimeoutError: at the time limit of a call.
            ProcessEnded: if the process has ended.
        """
        patience_s = self._timeout_s + (_SILENCE_S if self._async_room else 0.0)
        answer = await asyncio.wait_for(process.answer(), patience_s)
        self._moved_s = time.monotonic()
        process.read_output()
        process.flush_output()
        try:
            number, value, error, named, trace = answer
            is_late = error == TIMED_OUT
            found = None if error is None or is_late else RewardError(*error)
            job = open_jobs.pop(number)
        except (TypeError, ValueError, KeyError):
            raise ProcessEnded("its process does not answer as it should") from None
        if is_late:
            self._retry([job], "timed_out", f"took longer than {self._timeout_s:g} s")
            return
        if found is not None:
            self._log.error(self.name, [job.given], found, trace)
        self._failures.clear()
        job.finish(Outcome(value, found, named))

    def _retry(self, jobs: Sequence[_Job], cause: Cause, problem: str) -> None:
        """Handles the jobs of a process that died or took too long: scored again, or failed."""
        again = [job for job in jobs if not job.failures]
        if again:
            repeated = RewardError(cause, f"{problem}; repeated alone")
            self._log.error(self.name, [job.given for job in again], repeated, "")
        for job in jobs:
            job.failures += 1
            if job.failures == 1:
                self._alone.append(job)
            else:
                self._fail(job, cause, problem)
        self._wake.set()

    def _fail(self, job: _Job, cause: Cause, problem: str) -> None:
        """Fails a job; gives up those that would fail alike.

        The rollouts of a prompt often fail for the same reason, so that failures of one prompt give
        up only this prompt, and those of several prompts all that wait.
        """
        error = RewardError(cause, printable(problem))
        self._log.error(self.name, [job.given], error, "")
        job.finish(Outcome(None, error))
        prompt = job.given.prompt_id
        self._failures[prompt] += 1
        if len(self._failures) >= MAX_FAILURES_IN_A_ROW:
            self._give_up([*self._alone, *self._waiting], cause, f"prompts in a row: {problem}")
        elif self._failures[prompt] >= MAX_FAILURES_IN_A_ROW:
            own = [one for one in (*self._alone, *self._waiting) if one.given.prompt_id == prompt]
            self._give_up(own, cause, f"completions of the prompt: {problem}")

    def _give_up(self, jobs: Sequence[_Job], cause: Cause, problem: str) -> None:
        self._failures.clear()
        given_up = RewardError(
            cause, printable(f"given up after failures of {MAX_FAILURES_IN_A_ROW} {problem}")
        )
        if jobs:
            self._log.error(self.name, [job.given for job in jobs], given_up, "")
        for job in jobs:
            job.finish(Outcome(None, given_up))

    async def _started(self, index: int) -> RewardProcess:
        """A new process; see `RewardProcess.start`."""

        def output(text: str) -> None:
            inputs = [job.given for job in self._open[index].values()]
            what = "it is interrupted here" if process.dumps else "output"
            self._log.output(self.name, inputs, text, what=what)

        process = RewardProcess(self._settings, output=output)
        try:
            await asyncio.wait_for(process.start(), START_TIMEOUT_S)
            if self._facts is not None and process.facts["sha256"] != self._facts.sha256:
                raise ValueError("its file has changed since the run was started")
        except TimeoutError:
            await process.kill()
            raise ProcessEnded(f"importing it took longer than {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await process.kill()
            raise
        return process

    async def _end(self, index: int) -> None:
        process, self._processes[index] = self._processes[index], None
        if process is not None:
            await process.kill()

    @property
    def _async_room(self) -> int:
        """Inputs that a process scores at a time; 0: the function is not async."""
        assert self._facts is not None
        return (self._concurrency or CONCURRENCY) if self._facts.kind == "async" else 0
