"""Work abandoned at its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.clock import Clock
from pipeline.data.splits import LoadedData
from pipeline.protocols import ProcessUse
from pipeline.rollout import workers as workers_module
from pipeline.rollout.workers import OutOfTime, Workers
from pipeline.types import RolloutName, RolloutRequest, WorkDeadline
from tests.run_process import LocalScorer, Script
from tests.samples import make_config, make_data
from tests.stub_workers import StubLearner, StubSampler, VirtualLoop

DATA: LoadedData = make_data()


class WaitingSampler(StubSampler):
    """Returns when released or aborted.

    Attributes:
        answers: releases it.
        notices: whether it ends when it is aborted.
    """

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.answers, self.notices = asyncio.Event(), True

    async def _decode(self, requests: Sequence[RolloutRequest]) -> None:
        await self.answers.wait()
        await super()._decode(requests)

    async def abort(self) -> None:
        if self.notices:
            await super().abort()


def requests() -> list[RolloutRequest]:
    return [RolloutRequest(RolloutName("train", 0, p.id, 0), p.tokens) for p in DATA.train.prompts]


def make_workers(tmp_path: Path) -> tuple[Workers, WaitingSampler]:
    config, script = make_config(tmp_path), Script()
    sampler = WaitingSampler(script)
    found = Workers(
        samplers=[sampler],
        learner=StubLearner(script, disk={}),
        scorer=LocalScorer(script, config),
        config=config,
        clock=Clock(0.0, now=lambda: asyncio.get_running_loop().time()),
        stop=script.stop,
    )
    return found, sampler


def simulate(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def until(seconds: float, *, stopped_by_s: float = 105.0) -> WorkDeadline:
    return WorkDeadline(seconds, stopped_by_s)


def test_overlong_sampling_is_abandoned_and_the_sampler_works_again(tmp_path: Path):
    async def run() -> None:
        workers, sampler = make_workers(tmp_path)
        await workers.publish()
        with pytest.raises(OutOfTime):
            await workers.generate(requests(), temperature=1.0, deadline=until(5.0))
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        sampler.answers.set()
        completions, _ = await workers.generate(requests(), temperature=1.0)
        assert len(completions) == len(DATA.train.prompts)

    simulate(run())


def test_work_is_not_started_after_its_deadline(tmp_path: Path):
    async def run() -> None:
        workers, sampler = make_workers(tmp_path)
        await workers.publish()
        with pytest.raises(OutOfTime):
            await workers.generate(requests(), temperature=1.0, deadline=until(0.0))
        assert not any("generate" in call for call in sampler.script.calls)

    simulate(run())


@pytest.mark.parametrize(("most_s", "stopping_s", "ended_s"), [(7, 9, 12), (7, 4, 9)])
def test_a_sampler_that_does_not_stop_is_not_called_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most_s: float,
    stopping_s: float,
    ended_s: float,
):
    monkeypatch.setattr(workers_module, "STOPPING_S", most_s)

    async def run() -> None:
        workers, sampler = make_workers(tmp_path)
        deadline = until(5.0, stopped_by_s=5.0 + stopping_s)
        sampler.notices = False
        await workers.publish()
        with pytest.raises(OutOfTime):
            await workers.generate(requests(), temperature=1.0, deadline=deadline)
        assert asyncio.get_running_loop().time() == pytest.approx(ended_s)
        sampler.answers.set()
        with pytest.raises(OutOfTime):
            await workers.generate(requests(), temperature=1.0)

    simulate(run())


def test_a_process_that_is_stuck_or_dead_reports_no_use(tmp_path: Path):
    async def stuck() -> ProcessUse:
        await asyncio.Event().wait()
        raise AssertionError

    async def dead() -> ProcessUse:
        raise RuntimeError("an actor's process ended unexpectedly")

    async def run() -> None:
        workers, sampler = make_workers(tmp_path)
        for use, waited_s in ((stuck, workers_module.ANSWER_S), (dead, 0.0)):
            sampler.use = use  # type: ignore[method-assign]
            began_s = asyncio.get_running_loop().time()
            found = await workers.uses()
            assert found.keys() == {"learner", "reward correct", "reward format"}
            assert asyncio.get_running_loop().time() - began_s == waited_s

    simulate(run())
