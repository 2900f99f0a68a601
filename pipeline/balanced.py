"""Sampler and learner as the coordinator sees them: the same work, whatever sizes it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.balance import Balance, ResizableLearner, ResizableSampler, Worker
from pipeline.data.packing import Packed
from pipeline.datatypes import (
    Completion,
    ExportReport,
    Published,
    Rollout,
    RolloutRequest,
    Which,
    Work,
)
from pipeline.plan.sizes import Sizes
from pipeline.run_dir import RunFolder


@dataclass
class BalancedSampler:
    """See `pipeline.interfaces.Sampler`."""

    inner: ResizableSampler
    balance: Balance
    number: int
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        """Is not prepared yet."""
        self.worker = Worker(f"sampler {self.number}", self.inner)

    async def load(self, published: Published) -> str:
        """See `pipeline.interfaces.Sampler`."""
        return await self.balance.hold(self.worker, lambda: self.inner.load(published))

    async def generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float, enough: int | None = None
    ) -> list[Completion]:
        """See `pipeline.interfaces.Sampler`."""
        return await self.balance.hold(
            self.worker,
            lambda: self.inner.generate(requests, temperature=temperature, enough=enough),
        )

    async def work(self) -> Work:
        """See `pipeline.interfaces.Sampler`."""
        return await self.inner.work()

    async def abort(self) -> None:
        """See `pipeline.interfaces.Sampler`."""
        await self.inner.abort()

    async def resume(self) -> None:
        """See `pipeline.interfaces.Sampler`."""
        await self.inner.resume()


@dataclass
class BalancedLearner:
    """See `pipeline.interfaces.Learner`."""

    inner: ResizableLearner
    balance: Balance
    worker: Worker = field(init=False)

    def __post_init__(self) -> None:
        """Is not prepared yet."""
        self.worker = Worker("learner", self.inner)

    async def publish(self, which: Which = "current") -> Published:
        """See `pipeline.interfaces.Learner`."""
        return await self.balance.hold(self.worker, lambda: self.inner.publish(which))

    async def score(self, completions: Sequence[Completion], *, which: Which) -> list[np.ndarray]:
        """See `pipeline.interfaces.Learner`."""
        return await self.balance.hold(
            self.worker, lambda: self.inner.score(completions, which=which)
        )

    async def imitate(self, sequences: Sequence[Packed]) -> dict[str, float]:
        """See `pipeline.interfaces.Learner`."""
        metrics = await self.balance.hold(self.worker, lambda: self.inner.imitate(sequences))
        self.balance.step += 1
        return metrics

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        """See `pipeline.interfaces.Learner`."""
        metrics = await self.balance.hold(
            self.worker, lambda: self.inner.update(rollouts, rate=rate)
        )
        self.balance.learned(rollouts)
        return metrics

    async def save(self, meta: Mapping[str, Any]) -> None:
        """See `pipeline.interfaces.Learner`; with the sizes in force, where they may change."""
        balance = self.balance
        if not balance.config.plan.fixed:
            meta = {**meta, "sizes": balance.sizes.to_json()}
        await self.inner.save(meta)
        balance.checkpointed()

    async def keep_best(self) -> None:
        """See `pipeline.interfaces.Learner`."""
        await self.inner.keep_best()

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: Which
    ) -> ExportReport:
        """See `pipeline.interfaces.Learner`."""
        return await self.balance.hold(
            self.worker, lambda: self.inner.export(folder, examples, which=which)
        )


@dataclass(frozen=True)
class Balanced:
    """The processes of a run that have sizes, and the balance between them."""

    balance: Balance
    samplers: list[BalancedSampler]
    learner: BalancedLearner

    @staticmethod
    def of(
        config: Config,
        folder: RunFolder,
        *,
        samplers: Sequence[ResizableSampler],
        learner: ResizableLearner,
        say: Callable[[str], None],
        sizes: Sizes | None = None,
    ) -> Balanced:
        """None is prepared yet; what is to be known before the run's records begin is said."""
        balance = Balance.of(config, folder, say=say, sizes=sizes)
        drawing = [
            BalancedSampler(sampler, balance, number) for number, sampler in enumerate(samplers)
        ]
        return Balanced(balance, drawing, BalancedLearner(learner, balance))

    async def start(self, *, one_process: bool) -> float:
        """Prepares all; returns the seconds that loading the learner's base took.

        Args:
            one_process: sampler and learner are the same one, which prepares itself once.

        Raises:
            OutOfMemory: if there are no sizes with which they can begin.
        """
        workers = [self.learner.worker, *(sampler.worker for sampler in self.samplers)]
        first, *_ = await self.balance.start(workers, one_process=one_process)
        return first.load_s
