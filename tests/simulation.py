"""Whole runs in simulated time: coordinator, examiner and run folder, workers that only wait.

Time passes in the event loop alone: where everybody waits, the clock jumps to whoever is woken
next. What a run may not know beforehand, as noise, drift, stalls and kills, stands in a `World`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef, ExportReport, Published
from pipeline.contracts.batches import PackedRow
from pipeline.contracts.clock import Clock
from pipeline.contracts.rollouts import Completion, Rollout, RolloutRequest
from rewards.base import Outcome, RewardInput
from tests.fakes import PROMPTS, Disk, FakeLearner, FakeSampler, FakeScorer, Killed, Process, Script


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for somebody else"
        self._loop.seconds += max(timeout, 0.0)
        found: list[Any] = super().select(0)
        return found


@dataclass
class World:
    """How long things take, and what goes wrong.

    Attributes:
        seed: of the noise.
        seconds: of a call, by its name; of `generate` by its phase.
        budget_s: of the run.
        drift: how many times as long what depends on the policy takes at the end of the budget as
            when training began.
        stalls: seconds added to the nth call of that name.
        kills: at which seconds of the run, on its own clock, processes are killed.
        noise: standard deviation of the logarithm of a call's seconds.
        calls: how often each name was called.
        trains_from_s: when training began.
        updates: from when to when updates went on, on the run's clock.
    """

    seed: int
    seconds: dict[str, float]
    budget_s: float
    drift: float = 1.0
    stalls: dict[tuple[str, int], float] = field(default_factory=dict)
    kills: list[float] = field(default_factory=list)
    noise: float = 0.05
    calls: dict[str, int] = field(default_factory=dict)
    trains_from_s: float | None = None
    updates: list[tuple[float, float]] = field(default_factory=list)

    def takes_s(self, name: str, *, now_s: float, share: float = 1.0) -> float:
        """Seconds of the next call of that name, which begins now."""
        count = self.calls[name] = self.calls.get(name, 0) + 1
        rng = np.random.default_rng([self.seed, len(name), sum(name.encode()), count])
        seconds = self.seconds.get(name, 0.0) * float(np.exp(self.noise * rng.standard_normal()))
        if name == "train" and self.trains_from_s is None:
            self.trains_from_s = now_s
        if name in _DRIFTING:
            began_s = now_s if self.trains_from_s is None else self.trains_from_s
            passed = (now_s - began_s) / max(self.budget_s - began_s, 1.0)
            fixed = 0.2 if name in {"train", "update"} else 0.05
            seconds *= self.drift ** min(passed, 1.0) * (fixed + (1 - fixed) * share)
        return seconds + self.stalls.get((name, count), 0.0)


_DRIFTING = {"train", "validation", "test", "update"}


class Timeline(Script):
    """Lets the time of a call pass, unless the process is killed before its end."""

    def __init__(self, world: World, *, used_s: float, config: Config) -> None:
        super().__init__()
        self.world, self.used_s = world, used_s
        self.full = config.rollout.prompts_per_step
        self.clock = lambda: asyncio.get_running_loop().time()  # type: ignore[assignment]

    def note(self, name: str) -> None:
        self.calls.append(name)

    async def spend(self, name: str, *, share: float = 1.0) -> None:
        """Waits as long as a call of that name takes.

        Raises:
            Killed: at the moment at which the process is killed.
        """
        now_s = self.used_s + asyncio.get_running_loop().time()
        seconds = self.world.takes_s(name, now_s=now_s, share=share)
        if name == "update":
            self.world.updates.append((now_s, now_s + seconds))
        kill_s = self.world.kills[0] if self.world.kills else float("inf")
        if now_s + seconds > kill_s:
            await asyncio.sleep(max(kill_s - now_s, 0.0))
            raise Killed
        await asyncio.sleep(seconds)


class SlowSampler(FakeSampler):
    """Draws at once, after the time that it takes."""

    script: Timeline

    async def load(self, published: Published) -> str:
        return await super().load(published)

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        phase = requests[-1].name.phase
        prompts = len({request.name.prompt_id for request in requests})
        share = prompts / (self.script.full if phase == "train" else PROMPTS)
        wait = asyncio.create_task(self.script.spend(phase, share=share))
        aborted = asyncio.create_task(self.aborted.wait())
        await asyncio.wait({wait, aborted}, return_when=asyncio.FIRST_COMPLETED)
        aborted.cancel()
        if not wait.done():
            wait.cancel()
            raise RuntimeError("aborted")
        wait.result()
        return await super().generate(requests, temperature=temperature, min_finished=min_finished)


class SlowScorer(FakeScorer):
    script: Timeline

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        await self.script.spend("score")
        return await super().score(inputs)


class SlowLearner(FakeLearner):
    """Notes when each export was in place, on the run's clock."""

    script: Timeline

    async def publish(self, which: AdapterRef = "current") -> Published:
        await self.script.spend("publish")
        return await super().publish(which)

    async def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        await self.script.spend("update")
        return await super().sft_update(sequences)

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        prompts = len({rollout.completion.name.prompt_id for rollout in rollouts})
        await self.script.spend("update", share=prompts / self.script.full)
        return await super().update(rollouts, rate=rate)

    async def save(self, meta: Mapping[str, Any]) -> None:
        if self.version not in self.disk:
            await self.script.spend("save")
        await super().save(meta)

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        await self.script.spend("export")
        return await super().export(folder, examples, which=which)


class TimedProcess(Process):
    """A process of a run in a world; takes its time to start.

    Attributes:
        ready_s: when it had started, on the run's clock.
    """

    ready_s: float

    def __init__(self, config: Config, *, world: World, disk: Disk, **more: Any) -> None:
        super().__init__(config, disk=disk, **more)
        timeline = Timeline(world, used_s=self.clock.used_before_s, config=config)
        self.script = timeline
        self.clock = Clock(0.0, used_before_s=timeline.used_s, now=timeline.clock)
        skills = np.random.default_rng(world.seed).uniform(0.1, 0.9, 1000)
        sampler = SlowSampler(timeline, seed=config.run.seed, number=0)
        sampler.skill = lambda version: float(skills[version % 1000])
        self.samplers = [sampler]
        self.learner = SlowLearner(timeline, disk=disk)
        self.scorer = SlowScorer(timeline, config)

    def run_in_time(self) -> str:
        """Runs until it ends, is refused or is killed."""
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            try:
                return runner.run(self._run())
            except Killed:
                self.folder.record_used_s(self.script.world.kills.pop(0))  # type: ignore[attr-defined]
                return "killed"
            finally:
                self.folder.close()

    async def _run(self) -> str:
        timeline = self.script
        assert isinstance(timeline, Timeline)
        await timeline.spend("start")
        self.ready_s = timeline.used_s + timeline.clock()
        self.connect()
        return await self.coordinator.run()


__all__ = ["PROMPTS", "TimedProcess", "World"]
