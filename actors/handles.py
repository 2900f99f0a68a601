"""Ray actors as the coordinator sees them: the one place that applies `ray.remote`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.colocated_actor import ColocatedActor
from actors.exporter_actor import ExporterActor
from actors.learner_actor import LearnerActor
from actors.placement import Lease, Reservation, device_free_lease, lease
from actors.reward_actors import RewardActor, RewardPool, RewardWorker, WorkerDied
from actors.sampler_actor import SamplerActor
from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef, Published
from pipeline.contracts.rollouts import Completion
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.workers import LearnerWorker, SamplerWorker
from rewards.base import Outcome, RewardInput

# One thread works, the other answers `abort` and `building` meanwhile.
_THREADS = 2


def spawn(
    cls: type, *args: Any, lease: Lease, name: str, strategy: Any = None, threads: int = 1
) -> Any:
    """Starts a Ray actor of a plain class with the lease's resources; Ray never restarts it.

    Args:
        cls: the class.
        args: of its constructor.
        lease: resources and environment.
        name: shown by Ray's tools; unique in this process's job.
        strategy: Ray's scheduling strategy; None: any node with free resources.
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


async def _result(ref: Awaitable[Any]) -> Any:
    """Awaits a Ray call; raises the actor's own exception, without Ray's wrapper.

    Raises:
        RuntimeError: if the actor's process died.
    """
    try:
        return await ref
    except RayTaskError as error:
        raise (error.cause or error) from None
    except RayActorError as error:
        raise RuntimeError(f"an actor's process ended unexpectedly: {error}") from None


class RayWorker:
    """A Ray actor as a worker: each method of the actor, as an async method.

    Callers see the protocols of `pipeline.contracts.workers`. Exceptions are the actor's own; a
    `RuntimeError` is raised if its process died. An adapter travels through Ray's object store,
    from actor to actor; the driver holds only a reference to it.

    Attributes:
        actor: the Ray actor.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self.actor, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await _result(method.remote(*args, **kwargs))

        return call

    async def publish(self, which: AdapterRef = "current") -> Published:
        """See `pipeline.contracts.workers.Learner`; the payload is a reference."""
        label, payload = self.actor.publish.options(num_returns=2).remote(which=which)
        version, sha256 = await _result(label)
        return Published(version, sha256, payload)

    async def load(self, published: Published) -> str:
        """See `pipeline.contracts.workers.Sampler`; Ray resolves the payload in the actor."""
        sha256: str = await _result(
            self.actor.load.remote(published.version, published.sha256, published.payload)
        )
        return sha256

    def kill(self) -> None:
        """Ends the process at once."""
        ray.kill(self.actor)


class RayRewardWorker(RayWorker):
    """A reward process; see `actors.reward_actors.RewardWorker`."""

    async def score(self, name: str, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """See `actors.reward_actors.RewardWorker`."""
        try:
            outcomes: list[Outcome] = await self.actor.score.remote(name, inputs)
        except RayError:  # the process died, or an interrupt hit it outside of the function
            raise WorkerDied from None
        return outcomes


class RayExporter(RayWorker):
    """The exporter's process; see `actors.exporter_actor.ExporterActor` for its methods.

    Attributes:
        actor: the Ray actor.
        devices: the reservation of its devices.
    """

    def __init__(self, devices: Reservation, actor: Any) -> None:
        super().__init__(actor)
        self.devices = devices

    @staticmethod
    def spawn(config: Config, *, described: Config, examples: Sequence[Completion]) -> RayExporter:
        """Requests the process from Ray; see `actors.exporter_actor.ExporterActor`."""
        exporter_lease = lease(config.plan, config.plan.learner_devices)
        devices = Reservation(_run_name(config), [exporter_lease])
        actor = spawn(
            ExporterActor,
            config,
            described,
            tuple(examples),
            lease=exporter_lease,
            name=f"{_run_name(config)}: exporter",
            strategy=devices.bundle(0),
            threads=_THREADS,
        )
        return RayExporter(devices, actor)

    def kill(self) -> None:
        """Ends the process and releases its devices."""
        super().kill()
        self.devices.release()


@dataclass(frozen=True)
class SamplerActors:
    """The sampler processes of a command that does not train.

    Attributes:
        config: of the run.
        devices: the reservation of their devices.
        actors: the Ray actors.
        samplers: one per actor.
    """

    config: Config
    devices: Reservation
    actors: tuple[Any, ...]
    samplers: list[SamplerWorker]

    @staticmethod
    def spawn(config: Config) -> SamplerActors:
        """Requests the processes from Ray; they may have to wait for devices."""
        plan = config.plan
        sampler_lease = lease(plan, plan.devices_per_sampler)
        devices = Reservation(_run_name(config), [sampler_lease] * plan.num_samplers)
        actors = _spawn_samplers(config, sampler_lease, devices, first_bundle=0)
        return SamplerActors(config, devices, actors, _sampler_workers(actors))

    async def start(self, sizes: Sizes) -> None:
        """Compiles the programs of all samplers for these sizes."""
        await asyncio.gather(*(sampler.prepare(sizes) for sampler in self.samplers))

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        for actor in self.actors:
            ray.kill(actor)
        self.devices.release()


def _spawn_samplers(
    config: Config, sampler_lease: Lease, devices: Reservation, *, first_bundle: int
) -> tuple[Any, ...]:
    """The Ray actors of all samplers, in the reservation's bundles from `first_bundle` on."""
    return tuple(
        spawn(
            SamplerActor,
            config,
            lease=sampler_lease,
            name=f"{_run_name(config)}: sampler {number}",
            strategy=devices.bundle(first_bundle + number),
            threads=_THREADS,
        )
        for number in range(config.plan.num_samplers)
    )


def _sampler_workers(actors: Sequence[Any]) -> list[SamplerWorker]:
    return [cast("SamplerWorker", RayWorker(actor)) for actor in actors]


def _run_name(config: Config) -> str:
    """Prefix of the names that Ray's tools show for the processes and devices of a run."""
    return f"run {config.run.name}"


def _spawn_reward_worker(config: Config, *, name: str) -> RewardWorker:
    actor = spawn(RewardActor, config.rewards, lease=device_free_lease(), name=name)
    return cast("RewardWorker", RayRewardWorker(actor))


@dataclass(frozen=True)
class RunActors:
    """All processes of a training run.

    Attributes:
        devices: the reservation of their devices.
        actors: the Ray actors that hold devices.
        samplers: in a colocated run, the learner's worker.
        learner: the learner's process.
        scorer: the reward processes.
    """

    devices: Reservation
    actors: tuple[Any, ...]
    samplers: list[SamplerWorker]
    learner: LearnerWorker
    scorer: RewardPool

    @staticmethod
    def spawn(config: Config) -> RunActors:
        """Requests the processes from Ray; they may have to wait for devices."""
        plan, run = config.plan, _run_name(config)
        colocated = plan.placement == "colocated"
        learner_lease = lease(plan, plan.learner_devices)
        sampler_lease = lease(plan, plan.devices_per_sampler)
        leases = [learner_lease, *([] if colocated else [sampler_lease] * plan.num_samplers)]
        devices = Reservation(run, leases)
        learner = spawn(
            ColocatedActor if colocated else LearnerActor,
            config,
            lease=learner_lease,
            name=f"{run}: learner",
            strategy=devices.bundle(0),
            threads=_THREADS,
        )
        samplers = (
            () if colocated else _spawn_samplers(config, sampler_lease, devices, first_bundle=1)
        )
        # Names are never reused: a replaced worker may still hold its name for a moment.
        names = (f"{run}: rewards {number}" for number in itertools.count())
        scorer = RewardPool(
            config.rewards,
            lambda: _spawn_reward_worker(config, name=next(names)),
        )
        learner_worker = cast("LearnerWorker", RayWorker(learner))
        sampler_workers = (
            [cast("SamplerWorker", learner_worker)] if colocated else _sampler_workers(samplers)
        )
        actors = (learner, *samplers)
        return RunActors(devices, actors, sampler_workers, learner_worker, scorer)

    async def started(self) -> None:
        """Returns when the processes that hold devices have been started.

        Errors are ignored here: the next call of an actor that failed raises them.
        """
        ready = (actor.__ray_ready__.remote() for actor in self.actors)
        await asyncio.gather(*ready, return_exceptions=True)

    @property
    def one_process(self) -> bool:
        """Whether sampler and learner are the same process."""
        return len(self.actors) == 1

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        self.scorer.close()
        for actor in self.actors:
            ray.kill(actor)
        self.devices.release()
