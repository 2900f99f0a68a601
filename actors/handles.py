"""Ray actors as the coordinator sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.exporter_actor import ExporterActor
from actors.learner_actor import LearnerActor
from actors.model_actor import ModelActor
from actors.reward_actor import RewardActor
from actors.sampler_actor import SamplerActor
from configs.model import Format
from pipeline.clock import Heartbeat
from pipeline.compute.builds import Building, Ready
from pipeline.data.packed_batch import PackedRow
from pipeline.plan.sizes import Sizes
from pipeline.protocols import ProcessUse, SamplerTimes, WorkerDied
from pipeline.types import (
    AdapterRef,
    Completion,
    DecodeWork,
    ExportReport,
    OpenedAdapter,
    Published,
    Restored,
    Rollout,
    RolloutRequest,
)
from rewards.base import Outcome, RewardFacts, RewardInput

P = ParamSpec("P")
T = TypeVar("T")

_CLOSING_S = 5.0
_MEMORY = "low on memory"
"""In Ray's message where it has ended a process because the host ran out of memory."""


class Handle:
    """A Ray actor as a worker; the subclasses have its methods, as async methods.

    Exceptions are the actor's own; a `WorkerDied` is raised if its process died. An adapter travels
    through Ray's object store, from actor to actor; the driver holds only a reference to it.
    `name` is that of the process, in messages.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self.actor = actor
        self._name = name

    async def _call(
        self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls a method of the actor, given as one of its class."""
        found: T = await self._result(getattr(self.actor, method.__name__).remote(*args, **kwargs))
        return found

    async def _result(self, ref: Awaitable[Any]) -> Any:
        """Awaits a call; raises the actor's own exception, without Ray's wrapper.

        Raises:
            WorkerDied: if the actor's process died.
        """
        try:
            return await ref
        except RayTaskError as error:
            raise (error.cause or error) from None
        except RayActorError as error:
            why = "its process ended unexpectedly"
            if _MEMORY in str(error):
                why += ", because the host ran low on memory"
            raise WorkerDied(self._name, why) from None

    def kill(self) -> None:
        """Ends the process at once."""
        ray.kill(self.actor)


class ModelHandle(Handle):
    """A process that holds the model; see `actors.model_actor.ModelActor`."""

    async def find_model(self) -> str:
        """See `actors.model_actor.ModelActor.find_model`; errors name the node."""
        try:
            return await self._call(ModelActor.find_model)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(
                f"{error}; this is on {await self.node()}, where {self._name} runs: each node "
                "needs the files at that path, or a model of the hub (hf://OWNER/NAME) and a "
                "network"
            ) from None

    async def node(self) -> str:
        """See `actors.model_actor.ModelActor.node`."""
        return await self._call(ModelActor.node)

    async def prepare(self, sizes: Sizes) -> Ready:
        """See `pipeline.protocols.Worker`."""
        return await self._call(ModelActor.prepare, sizes)

    async def building(self) -> Building:
        """See `pipeline.protocols.Worker`."""
        return await self._call(ModelActor.building)

    async def use(self) -> ProcessUse:
        """See `pipeline.protocols.Worker`."""
        return await self._call(ModelActor.use)

    async def heartbeat(self) -> Heartbeat:
        """See `pipeline.protocols.Worker`."""
        return await self._call(ModelActor.heartbeat)

    async def start_trace(self, folder: str) -> None:
        """See `pipeline.protocols.Worker`."""
        await self._call(ModelActor.start_trace, folder)

    async def stop_trace(self) -> None:
        """See `pipeline.protocols.Worker`."""
        await self._call(ModelActor.stop_trace)


class SamplerHandle(ModelHandle):
    """See `pipeline.protocols.Sampler`."""

    async def load(self, published: Published) -> str:
        """Ray resolves the payload in the actor."""
        sha256: str = await self._result(
            self.actor.load.remote(published.version, published.payload)
        )
        return sha256

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        """See `pipeline.protocols.Sampler`."""
        return await self._call(
            SamplerActor.generate, requests, temperature=temperature, min_finished=min_finished
        )

    async def finished(self) -> list[Completion]:
        """See `pipeline.protocols.Sampler`."""
        return await self._call(SamplerActor.finished)

    async def work(self) -> DecodeWork:
        """See `pipeline.protocols.Sampler`."""
        return await self._call(SamplerActor.work)

    async def abort(self) -> None:
        """See `pipeline.protocols.Sampler`."""
        await self._call(SamplerActor.abort)

    async def resume(self) -> None:
        """See `pipeline.protocols.Sampler`."""
        await self._call(SamplerActor.resume)

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        """See `pipeline.protocols.Sampler`."""
        return await self._call(SamplerActor.open_adapter, path)

    async def sampler_times(self) -> SamplerTimes:
        """See `pipeline.protocols.Sampler`."""
        return await self._call(SamplerActor.sampler_times)


class LearnerHandle(ModelHandle):
    """See `pipeline.protocols.Learner`."""

    async def publish(self, which: AdapterRef = "current") -> Published:
        """The payload is a reference."""
        label, payload = self.actor.publish.options(num_returns=2).remote(which=which)
        version, sha256 = await self._result(label)
        return Published(version, sha256, payload)

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        """See `pipeline.protocols.Learner`."""
        return await self._call(LearnerActor.score, completions, which=which)

    async def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """See `pipeline.protocols.Learner`."""
        return await self._call(LearnerActor.sft_update, sequences)

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        """See `pipeline.protocols.Learner`."""
        return await self._call(LearnerActor.update, rollouts, rate=rate)

    async def save(self, meta: Mapping[str, Any]) -> None:
        """See `pipeline.protocols.Learner`."""
        await self._call(LearnerActor.save, meta)

    async def saved(self, *, wait: bool) -> float | None:
        """See `pipeline.protocols.Learner`."""
        return await self._call(LearnerActor.saved, wait=wait)

    async def keep_best(self) -> None:
        """See `pipeline.protocols.Learner`."""
        await self._call(LearnerActor.keep_best)

    async def recover_best(self, version: int, sha256: str) -> None:
        """See `pipeline.protocols.Learner`."""
        await self._call(LearnerActor.recover_best, version, sha256)

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """See `pipeline.protocols.Learner`."""
        return await self._call(LearnerActor.export, folder, examples, which=which)

    async def restore(self) -> Restored:
        """Restores the newest usable checkpoint, if there is one."""
        return await self._call(LearnerActor.restore)

    async def micro_batch_s(self) -> float:
        """See `pipeline.protocols.Learner`."""
        return await self._call(LearnerActor.micro_batch_s)


class ColocatedHandle(LearnerHandle, SamplerHandle):
    """One process that learns and samples."""


class ExporterHandle(Handle):
    """See `actors.exporter_actor.ExporterActor`."""

    async def start(self) -> str:
        """Opens devices, model and adapter, compiles; returns a description of the adapter."""
        return await self._call(ExporterActor.start)

    async def export(self, folder: str, formats: Sequence[Format]) -> ExportReport:
        """See `pipeline.compute.learner.export.Exporter.export`."""
        return await self._call(ExporterActor.export, folder, formats)


class ScorerHandle(Handle):
    """The host of the reward processes; see `pipeline.protocols.Scorer`."""

    async def start(self) -> list[RewardFacts]:
        """Starts the reward processes; returns what they report about their functions.

        Raises:
            ValueError: with a line for each function that cannot be used.
        """
        facts: list[RewardFacts] = await self._result(self.actor.start.remote())
        return facts

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """A call that is cancelled ends in the actor."""
        ref = self.actor.score.remote(inputs)
        try:
            scored: list[dict[str, Outcome]] = await self._result(ref)
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        return scored

    async def notices(self) -> list[str]:
        """See `pipeline.protocols.Scorer`."""
        return await self._call(RewardActor.notices)

    async def busy_s(self) -> dict[str, float]:
        """See `pipeline.protocols.Scorer`."""
        return await self._call(RewardActor.busy_s)

    async def heartbeat(self) -> Heartbeat:
        """See `pipeline.protocols.Scorer`."""
        return await self._call(RewardActor.heartbeat)

    def kill(self) -> None:
        """Ends the reward processes and what they have started, then their host."""
        ray.wait([self.actor.close.remote()], timeout=_CLOSING_S)
        super().kill()
