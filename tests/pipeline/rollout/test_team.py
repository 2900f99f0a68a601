"""Work that is abandoned because of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.contracts.rollouts import Completion, RolloutName, RolloutRequest
from pipeline.inputs.dataset.splits import LoadedData
from pipeline.rollout import team as team_module
from pipeline.rollout.team import OutOfTime, Team, Workers
from tests.fakes import (
    Disk,
    FakeLearner,
    FakeSampler,
    FakeScorer,
    Script,
    make_config,
    make_data,
)
from tests.simulation import VirtualLoop

DATA: LoadedData = make_data()


class PartialRollouts(FakeSampler):
    """Answers when it is told to or aborted."""

    answers: asyncio.Event
    notices = True

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        if not self.answers.is_set():
            await (self.aborted.wait() if self.notices else self.answers.wait())
            raise RuntimeError("aborted")
        return await super().generate(requests, temperature=temperature, min_finished=min_finished)


def requests() -> list[RolloutRequest]:
    return [RolloutRequest(RolloutName("train", 0, p.id, 0), p.tokens) for p in DATA.train.prompts]


def make_team(
    tmp_path: Path, patience_s: list[float | None], *, ending_s: float = 100.0
) -> tuple[Team, PartialRollouts]:
    config, script = make_config(tmp_path), Script()
    sampler = PartialRollouts(script, seed=0, number=0)
    sampler.answers = asyncio.Event()
    workers = Workers([sampler], FakeLearner(script, disk=Disk()), FakeScorer(script, config))
    found = Team(
        workers,
        config=config,
        stop=script.stop,
        patience_s=lambda: patience_s.pop(0),
        ending_s=lambda: ending_s,
    )
    return found, sampler


def test_what_takes_too_long_is_abandoned_and_the_sampler_works_again(tmp_path: Path):
    async def run() -> None:
        team, sampler = make_team(tmp_path, [5.0, None])
        await team.publish()
        with pytest.raises(OutOfTime):
            await team.generate(requests(), temperature=1.0)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        sampler.answers.set()
        assert len(await team.generate(requests(), temperature=1.0)) == len(DATA.train.prompts)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_nothing_is_begun_for_which_there_is_no_time(tmp_path: Path):
    async def run() -> None:
        team, sampler = make_team(tmp_path, [0.0])
        await team.publish()
        with pytest.raises(OutOfTime):
            await team.generate(requests(), temperature=1.0)
        assert not any("generate" in call for call in sampler.script.calls)

    asyncio.run(run())


@pytest.mark.parametrize(("most_s", "ending_s", "ended_s"), [(7, 9, 12), (7, 4, 9)])
def test_a_sampler_that_does_not_notice_is_not_asked_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most_s: float,
    ending_s: float,
    ended_s: float,
):
    monkeypatch.setattr(team_module, "ABORT_PATIENCE_S", most_s)

    async def run() -> None:
        team, sampler = make_team(tmp_path, [5.0, None], ending_s=ending_s)
        sampler.notices = False
        await team.publish()
        with pytest.raises(OutOfTime):
            await team.generate(requests(), temperature=1.0)
        assert asyncio.get_running_loop().time() == pytest.approx(ended_s)
        sampler.answers.set()
        with pytest.raises(OutOfTime):
            await team.generate(requests(), temperature=1.0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
