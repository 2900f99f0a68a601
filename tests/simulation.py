"""Whole runs in simulated time: the real coordinator and run folder, with workers that only sleep.

Time passes in the event loop alone: when all tasks wait, the clock jumps to the next timer. A
`World` holds what is unknown to the run: noise, drift, stalls and kills.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.clock import Clock
from pipeline.data.packed_batch import PackedRow
from pipeline.types import AdapterRef, Completion, ExportReport, Published, Rollout, RolloutRequest
from rewards.base import Outcome, RewardInput
from tests.fakes import Disk, FakeLearner, FakeSampler, FakeScorer, Killed, Process, Script
from tests.samples import PROMPTS


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock, in which sleeping takes no real time."""

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
        assert timeout is not None, "all tasks wait for each other"
        self._loop.seconds += max(timeout, 0.0)
        found: list[Any] = super().select(0)
        return found


@dataclass
class World:
    """Durations and failures of a simulated run; times are on the run's clock.

    Attributes:
        seed: seed of the noise.
        seconds: seconds of a call, by name; for `generate`, by phase.
        budget_s: the run's time budget.
        drift: factor by which calls that depend on the policy are slower at the end of the budget
            than at the start of training.
        stalls: seconds added to the nth call of a name.
        kills: times at which processes are killed.
        noise: standard deviation of the logarithm of a call's seconds.
        calls: number of calls so far, by name.
        trains_from_s: start of training.
        updates: start and end of each update.
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
        """Seconds of the next call of this name, if it starts now."""
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
    """Simulates the duration of calls, and the kill of the process."""

    def __init__(self, world: World, *, used_s: float, config: Config) -> None:
        super().__init__()
        self.world, self.used_s = world, used_s
        self.full = config.rollout.prompts_per_step
        self.clock = lambda: asyncio.get_running_loop().time()  # type: ignore[assignment]

    def note(self, name: str) -> None:
        self.calls.append(name)

    async def spend(self, name: str, *, share: float = 1.0) -> None:
        """Sleeps for the duration of a call of this name.

        Raises:
            Killed: when the process is killed during the call.
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
    """Sleeps for the duration of `generate`, then samples; can be aborted."""

    script: Timeline

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
    """Sleeps for the duration of each call."""

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
    """A process of a simulated run, with a start-up time."""

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
        """Runs the process until the run ends or is killed; 'killed' in the latter case."""
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
        self.connect()
        return await self.coordinator.run()
