"""Ray actors as the coordinator sees them: the one place that applies `ray.remote`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.colocated_actor import ColocatedActor
from actors.exporter_actor import ExporterActor
from actors.learner_actor import LearnerActor
from actors.placement import Lease, Reservation, device_free_lease, lease
from actors.reward_actors import RewardActor, RewardPool, RewardWorker, WorkerDied
from actors.sampler_actor import SamplerActor
from configs.schema import Config, Rewards
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


@dataclass(frozen=True)
class Process:
    """A process with devices.

    Attributes:
        cls: the class that it runs.
        devices: number of its devices.
        name: shown by Ray's tools, after the run's name.
        args: of the constructor.
    """

    cls: type
    devices: int
    name: str
    args: tuple[Any, ...]


class DeviceActors:
    """Ray actors that get their devices together or not at all; they may have to wait for them.

    Args:
        config: of the run.
        processes: in the order in which devices are assigned.

    Attributes:
        run: prefix of the names that Ray's tools show for the processes and devices.
        devices: the reservation of the devices.
        actors: one per process.
    """

    def __init__(self, config: Config, processes: Sequence[Process]) -> None:
        self.run = f"run {config.run.name}"
        leases = [lease(config.plan, process.devices) for process in processes]
        self.devices = Reservation(self.run, leases)
        self.actors = [
            spawn(
                process.cls,
                *process.args,
                lease=leases[number],
                name=f"{self.run}: {process.name}",
                strategy=self.devices.bundle(number),
                threads=_THREADS,
            )
            for number, process in enumerate(processes)
        ]

    async def started(self) -> None:
        """Returns when the processes have been started.

        Errors are ignored here: the next call of an actor that failed raises them.
        """
        ready = (actor.__ray_ready__.remote() for actor in self.actors)
        await asyncio.gather(*ready, return_exceptions=True)

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        for actor in self.actors:
            ray.kill(actor)
        self.devices.release()


def _samplers(config: Config) -> list[Process]:
    """The processes that only sample."""
    devices = config.plan.devices_per_sampler
    return [
        Process(SamplerActor, devices, f"sampler {number}", (config,))
        for number in range(config.plan.num_samplers)
    ]


class SamplerActors(DeviceActors):
    """The sampler processes of a command that does not train.

    Attributes:
        samplers: one per actor.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, _samplers(config))
        self.samplers = [cast("SamplerWorker", RayWorker(actor)) for actor in self.actors]

    async def start(self, sizes: Sizes) -> None:
        """Compiles the programs of all samplers for these sizes."""
        await asyncio.gather(*(sampler.prepare(sizes) for sampler in self.samplers))


class ExportActors(DeviceActors):
    """The exporter's process; see `actors.exporter_actor.ExporterActor`.

    Attributes:
        exporter: its methods.
    """

    def __init__(
        self, config: Config, *, described: Config, examples: Sequence[Completion]
    ) -> None:
        args = (config, described, tuple(examples))
        super().__init__(
            config, [Process(ExporterActor, config.plan.learner_devices, "exporter", args)]
        )
        self.exporter = RayWorker(self.actors[0])


class RunActors(DeviceActors):
    """All processes of a training run.

    Attributes:
        samplers: in a colocated run, the learner's worker.
        learner: the learner's process.
        scorer: the reward processes.
        one_process: whether sampler and learner are the same process.
    """

    def __init__(self, config: Config) -> None:
        self.one_process = config.plan.placement == "colocated"
        learner = ColocatedActor if self.one_process else LearnerActor
        processes = [Process(learner, config.plan.learner_devices, "learner", (config,))]
        super().__init__(
            config, processes if self.one_process else [*processes, *_samplers(config)]
        )
        workers = [RayWorker(actor) for actor in self.actors]
        self.learner = cast("LearnerWorker", workers[0])
        samplers = workers if self.one_process else workers[1:]
        self.samplers = [cast("SamplerWorker", worker) for worker in samplers]
        # Names are never reused: a replaced worker may still hold its name for a moment.
        self._reward_names = (f"{self.run}: rewards {number}" for number in itertools.count())
        self.scorer = RewardPool(config.rewards, partial(self._spawn_reward_worker, config.rewards))

    def _spawn_reward_worker(self, rewards: Rewards) -> RewardWorker:
        name = next(self._reward_names)
        actor = spawn(RewardActor, rewards, lease=device_free_lease(), name=name)
        return cast("RewardWorker", RayRewardWorker(actor))

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        self.scorer.close()
        super().kill()
