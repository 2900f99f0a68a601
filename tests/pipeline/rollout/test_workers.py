"""Work abandoned at its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.clock import Clock
from pipeline.protocols import WorkerDied
from pipeline.rollout.workers import STOPPING_S, Interrupted, OutOfTime, Workers
from pipeline.types import RolloutName, RolloutRequest
from tests.run_process import LocalScorer, Script
from tests.samples import make_config, make_prompts
from tests.stub_workers import StubWorker, VirtualLoop

REQUESTS = [RolloutRequest(RolloutName("train", 0, p.id, 0), p.tokens) for p in make_prompts(5)]


class WaitingWorker(StubWorker):
    """Returns when released or aborted.

    Attributes:
        answers: releases it.
        notices: whether it ends when it is aborted.
    """

    def __init__(self, script: Script) -> None:
        super().__init__(script, disk={})
        self.answers, self.notices = asyncio.Event(), True

    async def _decode(self, requests: Sequence[RolloutRequest]) -> None:
        await self.answers.wait()
        await super()._decode(requests)

    async def abort(self) -> None:
        if self.notices:
            await super().abort()


def simulate(folder: Path, work: Callable[[Workers, WaitingWorker], Awaitable[float]]) -> float:
    """The result of `work`, with workers that hold an adapter, in simulated time."""

    async def run() -> float:
        config, script = make_config(folder), Script()
        worker: Any = WaitingWorker(script)
        found = Workers(
            samplers=[worker],
            learner=worker,
            scorer=LocalScorer(script, config),
            config=config,
            clock=Clock(0.0, now=lambda: asyncio.get_running_loop().time()),
            stop=script.stop,
        )
        await found.publish()
        return await work(found, worker)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


@pytest.mark.parametrize("deadline", [5.0, 0.0])
def test_sampling_is_abandoned_at_its_deadline_and_the_sampler_works_again(
    tmp_path: Path, deadline: float
):
    async def work(workers: Workers, worker: WaitingWorker) -> float:
        with pytest.raises(OutOfTime):
            await workers.generate(REQUESTS, temperature=1.0, deadline=deadline)
        ended_s = asyncio.get_running_loop().time()
        assert ("sampler0.abort" in worker.script.calls) is (deadline > 0)  # else not started
        worker.answers.set()
        completions, _ = await workers.generate(REQUESTS, temperature=1.0)
        assert len(completions) == len(REQUESTS)
        return ended_s

    assert simulate(tmp_path, work) == pytest.approx(deadline)


@pytest.mark.parametrize(
    ("stopped", "error"), [(False, WorkerDied), (True, Interrupted)], ids=["deadline", "signal"]
)
def test_a_sampler_that_does_not_stop_ends_the_process_and_prevents_no_checkpoint_at_a_signal(
    tmp_path: Path, stopped: bool, error: type[Exception]
):
    async def work(workers: Workers, worker: WaitingWorker) -> float:
        worker.notices = False
        if stopped:
            asyncio.get_running_loop().call_later(5.0, worker.script.stop.set)
        deadline = None if stopped else 5.0
        with pytest.raises(error):
            await workers.generate(REQUESTS, temperature=1.0, deadline=deadline)
        return asyncio.get_running_loop().time()

    assert simulate(tmp_path, work) == pytest.approx(5.0 + STOPPING_S)
