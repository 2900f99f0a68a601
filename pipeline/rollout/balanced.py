"""Sampler and learner as the coordinator sees them: the same work, whatever sizes it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef, BestFile, ExportReport, Published
from pipeline.contracts.batches import PackedRow
from pipeline.contracts.rollouts import Completion, DecodeWork, Rollout, RolloutRequest
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.workers import ResizableLearner, ResizableSampler
from pipeline.plan.balance import Balance, Worker
from pipeline.run.run_folder import RunFolder


@dataclass
class BalancedSampler:
    """See `pipeline.contracts.workers.Sampler`."""

    inner: ResizableSampler
    balance: Balance
    worker: Worker

    async def load(self, published: Published) -> str:
        """See `pipeline.contracts.workers.Sampler`."""
        return await self.balance.hold(self.worker, lambda: self.inner.load(published))

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        """See `pipeline.contracts.workers.Sampler`."""
        return await self.balance.hold(
            self.worker,
            lambda: self.inner.generate(
                requests, temperature=temperature, min_finished=min_finished
            ),
        )

    async def work(self) -> DecodeWork:
        """See `pipeline.contracts.workers.Sampler`."""
        return await self.inner.work()

    async def abort(self) -> None:
        """See `pipeline.contracts.workers.Sampler`."""
        await self.inner.abort()

    async def resume(self) -> None:
        """See `pipeline.contracts.workers.Sampler`."""
        await self.inner.resume()


@dataclass
class BalancedLearner:
    """See `pipeline.contracts.workers.Learner`."""

    inner: ResizableLearner
    balance: Balance
    worker: Worker

    async def publish(self, which: AdapterRef = "current") -> Published:
        """See `pipeline.contracts.workers.Learner`."""
        return await self.balance.hold(self.worker, lambda: self.inner.publish(which))

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        """See `pipeline.contracts.workers.Learner`."""
        return await self.balance.hold(
            self.worker, lambda: self.inner.score(completions, which=which)
        )

    async def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """See `pipeline.contracts.workers.Learner`."""
        metrics = await self.balance.hold(self.worker, lambda: self.inner.sft_update(sequences))
        self.balance.learned()
        return metrics

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        """See `pipeline.contracts.workers.Learner`."""
        metrics = await self.balance.hold(
            self.worker, lambda: self.inner.update(rollouts, rate=rate)
        )
        self.balance.learned(rollouts)
        return metrics

    async def save(self, meta: Mapping[str, Any]) -> None:
        """Saves with the sizes in force, where they may change."""
        balance = self.balance
        if not balance.config.plan.fixed:
            meta = {**meta, "sizes": balance.sizes.to_json()}
        await self.inner.save(meta)
        balance.checkpointed()

    async def keep_best(self) -> None:
        """See `pipeline.contracts.workers.Learner`."""
        await self.inner.keep_best()

    async def recover_best(self, version: int, sha256: str) -> BestFile:
        """See `pipeline.contracts.workers.Learner`."""
        return await self.inner.recover_best(version, sha256)

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """See `pipeline.contracts.workers.Learner`."""
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
        one_process: bool = False,
    ) -> Balanced:
        """None is prepared yet; what is to be known before the run's records begin is said.

        Args:
            config: what is wanted.
            folder: the run's.
            samplers: at least one.
            learner: the one there is.
            say: says a line.
            sizes: to begin with; None: those of the newest checkpoint, given or planned.
            one_process: the sampler and the learner are the same one, which prepares itself once.
        """
        balance = Balance.of(config, folder, say=say, sizes=sizes)
        learning = Worker("sampler and learner" if one_process else "learner", learner)
        drawing = [
            BalancedSampler(
                sampler, balance, learning if one_process else Worker(f"sampler {number}", sampler)
            )
            for number, sampler in enumerate(samplers)
        ]
        return Balanced(balance, drawing, BalancedLearner(learner, balance, learning))

    @property
    def workers(self) -> list[Worker]:
        """Each process once, the learner's first."""
        workers = [self.learner.worker, *(sampler.worker for sampler in self.samplers)]
        return list({id(worker): worker for worker in workers}.values())

    async def start(self) -> float:
        """Prepares all; returns the seconds that loading the learner's base took.

        Raises:
            OutOfMemory: if there are no sizes with which they can begin.
        """
        first, *_ = await self.balance.start(self.workers)
        return first.load_s
