"""What the coordinator asks of the others. Ray actors answer in a run, plain objects in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pipeline.contracts.adapters import AdapterRef, BestFile, ExportReport, OpenedAdapter, Published
from pipeline.contracts.batches import Packed
from pipeline.contracts.builds import Building, Ready
from pipeline.contracts.rollouts import Completion, DecodeWork, Rollout, RolloutRequest
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import LearnerSpeed, SamplerSpeed
from rewards.base import Outcome, RewardInput


class Sampler(Protocol):
    """Draws completions under the adapter that it was last given."""

    async def load(self, published: Published) -> str:
        """Takes over an adapter; returns the hash of what it now holds."""

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        """One completion for each request, in their order.

        Args:
            requests: what is asked for.
            temperature: 0 is greedy.
            min_finished: number of finished rollouts after which the others are returned with stop
                reason "truncated"; None: all requests are finished.
        """

    async def work(self) -> DecodeWork:
        """What its last `generate` has computed."""

    async def abort(self) -> None:
        """Makes a running `generate` end soon, with an error, and every later one."""

    async def resume(self) -> None:
        """Lets it generate again, once what was aborted has ended."""


class Answerer(Sampler, Protocol):
    """A sampler that finds its adapters by itself."""

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        """Takes over the adapter at `path`, or none: the base alone.

        Raises:
            FileNotFoundError: if there is no adapter.
            ValueError: if it cannot be used, or is not for this base.
        """


class Learner(Protocol):
    """Owns adapter and optimizer."""

    async def publish(self, which: AdapterRef = "current") -> Published:
        """An adapter for the samplers."""

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        """Log-probs of the completions' tokens under an adapter."""

    async def sft_update(self, sequences: Sequence[Packed]) -> dict[str, float]:
        """Learns from one step's packed examples; returns metrics. The version goes up by one."""

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        """Learns from one step's rollouts; returns metrics. The version goes up by one.

        Args:
            rollouts: what is learned from.
            rate: the step's learning rate, where the decay is planned by the clock; None elsewhere.
        """

    async def save(self, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint of the current version, with `meta` in it."""

    async def keep_best(self) -> None:
        """Keeps the current adapter as the best so far; the one kept before is gone."""

    async def recover_best(self, version: int, sha256: str) -> BestFile:
        """Makes sure that the best adapter is this one, from wherever the run folder has it.

        Args:
            version: of the policy.
            sha256: hash of the adapter.

        Returns:
            What became of its file; after "lost" there is none.
        """

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """Writes the merged model, verified by loading it back."""


class Scorer(Protocol):
    """Runs the reward functions."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """For each input the outcome of each reward function, by its name."""


class Resizable(Protocol):
    """A process that compiles for given sizes."""

    async def prepare(self, sizes: Sizes) -> Ready:
        """Returns when it can work with these sizes; what was compiled for others is gone.

        Raises:
            OutOfMemory: if they are too much; it may be asked again for smaller ones.
        """

    async def building(self) -> Building:
        """How far it is; answered while it prepares itself."""


class ResizableSampler(Sampler, Resizable, Protocol):
    """A sampler whose slots may become fewer."""


class ResizableLearner(Learner, Resizable, Protocol):
    """A learner whose micro-batches may become smaller."""


class Draws(Protocol):
    """A sampler that can be measured."""

    async def drawing_speed(self) -> SamplerSpeed:
        """Seconds of the programs that it is prepared for.

        Raises:
            OutOfMemory: if there is no room for its slots.
        """


class Learns(Protocol):
    """A learner that can be measured."""

    async def learning_speed(self) -> LearnerSpeed:
        """Likewise.

        Raises:
            OutOfMemory: if there is no room for a micro-batch.
        """
