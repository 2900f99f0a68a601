"""Ray actors as the coordinator sees them: the one place that applies `ray.remote`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.colocated import ColocatedActor
from actors.exporter import ExporterActor
from actors.learner import LearnerActor
from actors.placement import Lease, Reservation, lease, light
from actors.rewards import RewardActor, RewardPool, WorkerDied
from actors.sampler import SamplerActor
from configs.schema import Config
from pipeline.contracts.adapters import (
    AdapterRef,
    BestFile,
    ExportReport,
    Format,
    OpenedAdapter,
    Published,
    Restored,
)
from pipeline.contracts.batches import PackedRow
from pipeline.contracts.builds import Building, Ready
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.rollouts import Completion, DecodeWork, Rollout, RolloutRequest
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import LearnerSpeed, SamplerSpeed
from rewards.base import Outcome, RewardInput

# Two threads: one works, the other can be told to abort.
_THREADS = 2


def spawn(
    cls: type, *args: Any, lease: Lease, name: str, strategy: Any = None, threads: int = 1
) -> Any:
    """A Ray actor of a plain class, with the lease's resources; never restarted by Ray.

    Args:
        cls: the class.
        args: of its constructor.
        lease: resources and environment.
        name: shown by Ray's tools; unique in this process's job.
        strategy: where it is put; None: where its resources are free.
        threads: of the actor.
    """
    resources = dict(lease.resources)
    options = {
        "name": name,
        "scheduling_strategy": strategy,
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "runtime_env": {"env_vars": dict(lease.variables)},
        "max_concurrency": threads,
        "max_restarts": 0,
    }
    return ray.remote(cls).options(**options).remote(*args)


async def _call(ref: Awaitable[Any]) -> Any:
    """Awaits a Ray call; what the actor raised comes out as itself, without Ray's wrapping.

    Raises:
        RuntimeError: if the actor's process died.
    """
    try:
        return await ref
    except RayTaskError as error:
        raise (error.cause or error) from None
    except RayActorError as error:
        raise RuntimeError(f"an actor's process ended unexpectedly: {error}") from None


class RaySampler:
    """A sampler in another process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def prepare(self, sizes: Sizes) -> Ready:
        """See `pipeline.contracts.workers.Resizable`."""
        ready: Ready = await _call(self.actor.prepare.remote(sizes))
        return ready

    async def building(self) -> Building:
        """See `pipeline.contracts.workers.Resizable`."""
        building: Building = await _call(self.actor.building.remote())
        return building

    async def load(self, published: Published) -> str:
        """The payload goes from actor to actor; the driver never holds it."""
        sha: str = await _call(
            self.actor.load.remote(published.version, published.sha256, published.payload)
        )
        return sha

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        """See `pipeline.contracts.workers.Answerer`."""
        opened: OpenedAdapter = await _call(self.actor.open_adapter.remote(path))
        return opened

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        """See `pipeline.contracts.workers.Sampler`."""
        drawn: list[Completion] = await _call(
            self.actor.generate.remote(
                list(requests), temperature=temperature, min_finished=min_finished
            )
        )
        return drawn

    async def drawing_speed(self) -> SamplerSpeed:
        """See `pipeline.contracts.workers.Draws`."""
        speed: SamplerSpeed = await _call(self.actor.drawing_speed.remote())
        return speed

    async def work(self) -> DecodeWork:
        """See `pipeline.contracts.workers.Sampler`."""
        work: DecodeWork = await _call(self.actor.work.remote())
        return work

    async def memory(self) -> MemoryUse:
        """See `launch.rehearsal.account.Process`."""
        use: MemoryUse = await _call(self.actor.sampler_memory.remote())
        return use

    async def abort(self) -> None:
        """See `pipeline.contracts.workers.Sampler`."""
        await _call(self.actor.abort.remote())

    async def resume(self) -> None:
        """See `pipeline.contracts.workers.Sampler`."""
        await _call(self.actor.resume.remote())


class RayLearner:
    """A learner in another process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def prepare(self, sizes: Sizes) -> Ready:
        """See `pipeline.contracts.workers.Resizable`."""
        ready: Ready = await _call(self.actor.prepare.remote(sizes))
        return ready

    async def building(self) -> Building:
        """See `pipeline.contracts.workers.Resizable`."""
        building: Building = await _call(self.actor.building.remote())
        return building

    async def memory(self) -> MemoryUse:
        """See `launch.rehearsal.account.Process`."""
        use: MemoryUse = await _call(self.actor.learner_memory.remote())
        return use

    async def restore(self) -> Restored:
        """Goes on from the newest usable checkpoint."""
        restored: Restored = await _call(self.actor.restore.remote())
        return restored

    async def publish(self, which: AdapterRef = "current") -> Published:
        """See `pipeline.contracts.workers.Learner`; the payload stays in Ray's object store."""
        label, payload = self.actor.publish.options(num_returns=2).remote(which=which)
        version, sha = await _call(label)
        return Published(version, sha, payload)

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        """See `pipeline.contracts.workers.Learner`."""
        rows: list[np.ndarray] = await _call(
            self.actor.score.remote(list(completions), which=which)
        )
        return rows

    async def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        """See `pipeline.contracts.workers.Learner`."""
        metrics: dict[str, float] = await _call(self.actor.sft_update.remote(list(sequences)))
        return metrics

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        """See `pipeline.contracts.workers.Learner`."""
        metrics: dict[str, float] = await _call(self.actor.update.remote(list(rollouts), rate=rate))
        return metrics

    async def learning_speed(self) -> LearnerSpeed:
        """See `pipeline.contracts.workers.Learns`."""
        speed: LearnerSpeed = await _call(self.actor.learning_speed.remote())
        return speed

    async def save(self, meta: Mapping[str, Any]) -> None:
        """See `pipeline.contracts.workers.Learner`."""
        await _call(self.actor.save.remote(dict(meta)))

    async def keep_best(self) -> None:
        """See `pipeline.contracts.workers.Learner`."""
        await _call(self.actor.keep_best.remote())

    async def recover_best(self, version: int, sha256: str) -> BestFile:
        """See `pipeline.contracts.workers.Learner`."""
        found: BestFile = await _call(self.actor.recover_best.remote(version, sha256))
        return found

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        """See `pipeline.contracts.workers.Learner`."""
        report: ExportReport = await _call(
            self.actor.export.remote(folder, list(examples), which=which)
        )
        return report


class RayExporter:
    """An exporter in another process.

    Attributes:
        devices: the process's.
        actor: the Ray actor.
    """

    def __init__(self, devices: Reservation, actor: Any) -> None:
        self.devices = devices
        self.actor = actor

    @staticmethod
    def spawn(config: Config, *, described: Config, examples: Sequence[Completion]) -> RayExporter:
        """Asks Ray for the process; see `actors.exporter.ExporterActor`."""
        alone = lease(config.plan, config.plan.learner_devices)
        devices = Reservation(_run_name(config), [alone])
        actor = spawn(
            ExporterActor,
            config,
            described,
            tuple(examples),
            lease=alone,
            name=f"{_run_name(config)}: exporter",
            strategy=devices.bundle(0),
            threads=_THREADS,
        )
        return RayExporter(devices, actor)

    async def start(self) -> str:
        """What the adapter is; returns when it is loaded."""
        what: str = await _call(self.actor.start.remote())
        return what

    async def begin(self, folder: str) -> None:
        """Makes the folder beside `folder` that is written into."""
        await _call(self.actor.begin.remote(folder))

    async def add(self, kind: Format) -> float | None:
        """Writes one format and loads it back: the largest log-prob difference, None: unscored."""
        difference: float | None = await _call(self.actor.add.remote(kind))
        return difference

    async def finish(self, folder: str, formats: Sequence[Format]) -> None:
        """Puts what was written in place."""
        await _call(self.actor.finish.remote(folder, list(formats)))

    def kill(self) -> None:
        """Ends the process; its devices are free afterwards."""
        ray.kill(self.actor)
        self.devices.release()


class RayRewardWorker:
    """A reward process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def start(self) -> None:
        """Returns when the functions are imported."""
        await _call(self.actor.start.remote())

    async def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """See `actors.rewards.Worker`."""
        try:
            outcomes: list[Outcome] = await self.actor.score.remote(name, list(inputs))
        except RayError:  # its end, or an interrupt that hit the process outside of the function
            raise WorkerDied from None
        return outcomes

    def kill(self) -> None:
        """Ends the process at once."""
        ray.kill(self.actor)


@dataclass(frozen=True)
class SamplerActors:
    """The processes that answer, where nothing is learned."""

    config: Config
    devices: Reservation
    samplers: list[RaySampler]

    @staticmethod
    def spawn(config: Config) -> SamplerActors:
        """Asks Ray for the processes; they may have to wait for devices."""
        plan = config.plan
        each = lease(plan, plan.devices_per_sampler)
        devices = Reservation(_run_name(config), [each] * plan.num_samplers)
        return SamplerActors(config, devices, _samplers(config, each, devices, first=0))

    async def start(self) -> None:
        """Returns when all are compiled."""
        sizes = Sizes.of(self.config)
        await asyncio.gather(*(sampler.prepare(sizes) for sampler in self.samplers))

    def kill(self) -> None:
        """Ends all processes; their devices are free afterwards."""
        for sampler in self.samplers:
            ray.kill(sampler.actor)
        self.devices.release()


def _samplers(config: Config, each: Lease, devices: Reservation, *, first: int) -> list[RaySampler]:
    """All samplers, in the bundles from number `first` on."""
    return [
        RaySampler(
            spawn(
                SamplerActor,
                config,
                lease=each,
                name=f"{_run_name(config)}: sampler {number}",
                strategy=devices.bundle(first + number),
                threads=_THREADS,
            )
        )
        for number in range(config.plan.num_samplers)
    ]


def _run_name(config: Config) -> str:
    """What processes and devices of a run are named after in Ray."""
    return f"run {config.run.name}"


@dataclass(frozen=True)
class RunActors:
    """All processes of a run."""

    devices: Reservation
    samplers: list[RaySampler]
    learner: RayLearner
    scorer: RewardPool

    @staticmethod
    def spawn(config: Config) -> RunActors:
        """Asks Ray for the processes; they may have to wait for devices."""
        plan, run = config.plan, _run_name(config)
        learners = lease(plan, plan.learner_devices)
        each = lease(plan, plan.devices_per_sampler)
        one_process = plan.placement == "colocated"
        devices = Reservation(
            run, [learners] if one_process else [learners, *[each] * plan.num_samplers]
        )
        first = spawn(
            ColocatedActor if one_process else LearnerActor,
            config,
            lease=learners,
            name=f"{run}: learner",
            strategy=devices.bundle(0),
            threads=_THREADS,
        )
        samplers = [RaySampler(first)] if one_process else _samplers(config, each, devices, first=1)
        # A worker that is replaced may still have its name for a moment.
        names = (f"{run}: rewards {number}" for number in itertools.count())
        scorer = RewardPool(
            config.rewards,
            lambda: RayRewardWorker(
                spawn(RewardActor, config.rewards, lease=light(), name=next(names))
            ),
        )
        return RunActors(devices, samplers, RayLearner(first), scorer)

    async def started(self) -> None:
        """Returns when the processes that hold devices have been started.

        Of one that failed whoever calls it next is told.
        """
        ready = (actor.__ray_ready__.remote() for actor in self.actors)
        await asyncio.gather(*ready, return_exceptions=True)

    @property
    def actors(self) -> list[Any]:
        """The Ray actors that hold devices, each once."""
        handles = [self.learner.actor, *(sampler.actor for sampler in self.samplers)]
        return list({id(handle): handle for handle in handles}.values())

    @property
    def one_process(self) -> bool:
        """Whether sampler and learner are the same process."""
        return self.samplers[0].actor is self.learner.actor

    def kill(self) -> None:
        """Ends all processes; their devices are free afterwards."""
        self.scorer.close()
        for actor in self.actors:
            ray.kill(actor)
        self.devices.release()
