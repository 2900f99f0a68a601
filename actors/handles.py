"""Ray actors as the coordinator sees them: the one place that applies `ray.remote`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.colocated_actor import ColocatedActor
from actors.exporter_actor import ExporterActor
from actors.learner_actor import LearnerActor
from actors.placement import Bundle, Lease, Reservation, device_free_lease, lease
from actors.reward_actor import RewardActor
from actors.sampler_actor import SamplerActor
from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef, Published
from pipeline.contracts.rollouts import Completion
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.workers import LearnerWorker, SamplerWorker, ScorerWorker, WorkerDied
from pipeline.run.run_folder import RunFolder
from rewards.base import Outcome, RewardInput

# One works, one may write a trace, one answers `abort`, `building` and `heartbeat` meanwhile.
_THREADS = 3
# Rollouts that have ended are scored in calls of their own.
_CONCURRENT_SCORES = 10_000
_CLOSING_S = 5.0
_START_S = 300.0
"""Time limit for a process to start again."""
_MEMORY = "low on memory"
"""In Ray's message where it has ended a process because the host ran out of memory."""


def spawn(
    cls: type, *args: Any, lease: Lease, name: str, strategy: Any = None, threads: int = 1
) -> Any:
    """Starts a Ray actor of a plain class with the lease's resources; Ray itself never restarts it.

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


class RayWorker:
    """A Ray actor as a worker: each method of the actor, as an async method.

    Callers see the protocols of `pipeline.contracts.workers`. Exceptions are the actor's own; a
    `WorkerDied` is raised if its process died. An adapter travels through Ray's object store,
    from actor to actor; the driver holds only a reference to it.

    Args:
        start: starts the process.
        name: of the process, in messages.
        bundle: its devices; None: it has none.

    Attributes:
        actor: the Ray actor.
    """

    def __init__(
        self, start: Callable[[], Any], *, name: str, bundle: Bundle | None = None
    ) -> None:
        self._start = start
        self._name = name
        self._bundle = bundle
        self._why: str | None = None
        self.actor = start()

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self.actor, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._result(method.remote(*args, **kwargs))

        return call

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
            raise WorkerDied(self._name, self._why or why) from None

    async def publish(self, which: AdapterRef = "current") -> Published:
        """See `pipeline.contracts.workers.Learner`; the payload is a reference."""
        label, payload = self.actor.publish.options(num_returns=2).remote(which=which)
        version, sha256 = await self._result(label)
        return Published(version, sha256, payload)

    async def load(self, published: Published) -> str:
        """See `pipeline.contracts.workers.Sampler`; Ray resolves the payload in the actor."""
        sha256: str = await self._result(
            self.actor.load.remote(published.version, published.sha256, published.payload)
        )
        return sha256

    def kill(self, why: str | None = None) -> None:
        """See `pipeline.contracts.workers.Restartable`."""
        self._why = why
        ray.kill(self.actor)

    async def restart(self) -> None:
        """See `pipeline.contracts.workers.Restartable`."""
        ray.kill(self.actor)
        self._why = None
        try:
            await asyncio.wait_for(self._start_again(), _START_S)
        except TimeoutError:
            why = f"its process did not start again in {_START_S:.0f} s"
            if self._bundle is not None and self._bundle.node is None:
                why = f"its node is gone, and no other had devices for it in {_START_S:.0f} s"
            raise WorkerDied(self._name, why) from None
        except (FileNotFoundError, ValueError) as error:
            raise WorkerDied(self._name, str(error)) from None

    async def _start_again(self) -> None:
        """Starts the process; one with devices on their node, or on another one.

        Raises:
            FileNotFoundError: if the node does not have the model's files.
            ValueError: if they cannot be used.
            WorkerDied: if the process dies, or cannot be restarted without the others.
        """
        if self._bundle is not None:
            await self._bundle.settled()
            if self._bundle.devices.is_stranded():
                why = "its node is gone, and only the node of this command has devices for it"
                raise WorkerDied(self._name, why, alone=False)
        self.actor = self._start()
        await self._result(self.actor.__ray_ready__.remote())
        if self._bundle is not None:
            await self.find_model()

    async def find_model(self) -> str:
        """Finds the model's files on the process's node; returns the fingerprint of the weights.

        Raises:
            FileNotFoundError: if they are missing; names the node, as all errors.
            ValueError: if they cannot be used, or downloaded.
            WorkerDied: if the process dies.
        """
        try:
            fingerprint: str = await self._result(self.actor.find_model.remote())
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(
                f"{error}; this is on {self.node}, where {self._name} runs: each node needs the "
                "files at that path, or a model of the hub (hf://OWNER/NAME) and a network"
            ) from None
        return fingerprint

    @property
    def node(self) -> str:
        """The node of the process, in words."""
        return str(self._bundle and self._bundle.node)


class RayScorer(RayWorker):
    """The host of the reward processes."""

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        """See `pipeline.contracts.workers.Scorer`; a call that is cancelled ends in the actor."""
        ref = self.actor.score.remote(inputs)
        try:
            scored: list[dict[str, Outcome]] = await self._result(ref)
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        return scored

    def kill(self, why: str | None = None) -> None:
        """Ends the reward processes and what they have started, then their host."""
        if why is None:  # else it does not answer
            ray.wait([self.actor.close.remote()], timeout=_CLOSING_S)
        super().kill(why)


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


@dataclass(frozen=True)
class DeviceActors:
    """Ray actors that get their devices together or not at all.

    Attributes:
        devices: the reservation of their devices.
        workers: the processes.
    """

    devices: Reservation
    workers: tuple[RayWorker, ...]

    async def started(self) -> None:
        """Returns when the processes have been started and have found the model on their nodes.

        Deaths are ignored here: the next call of an actor that died raises them.

        Raises:
            FileNotFoundError: if the model's files are missing on a node.
            ValueError: if they cannot be used, or differ between nodes.
        """
        finding = (worker.find_model() for worker in self.workers)
        found = await asyncio.gather(*finding, return_exceptions=True)
        first: tuple[str, str] | None = None
        for worker, fingerprint in zip(self.workers, found, strict=True):
            if isinstance(fingerprint, FileNotFoundError | ValueError):
                raise fingerprint
            if isinstance(fingerprint, BaseException):
                continue
            first = first or (fingerprint, worker.node)
            if fingerprint != first[0]:
                raise ValueError(
                    f"model.path: the weights on {worker.node} differ from those on {first[1]}; "
                    "put the same files on both, or name a revision: hf://OWNER/NAME@REVISION"
                )

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        for worker in self.workers:
            worker.kill()
        self.devices.release()


def _spawn_together(
    config: Config, processes: Sequence[Process], *, learner: bool = True
) -> DeviceActors:
    """Requests processes from Ray; they get devices in their order, and may have to wait.

    Args:
        config: of the run.
        processes: what runs on the devices.
        learner: whether the first has to be on the node of this process.
    """
    leases = [lease(config.plan, process.devices) for process in processes]
    devices = Reservation(_run_name(config), leases, learner=learner)
    workers = (
        RayWorker(
            partial(
                spawn,
                process.cls,
                *process.args,
                lease=leases[number],
                name=f"{_run_name(config)}: {process.name}",
                strategy=devices.bundle(number).strategy,
                threads=_THREADS,
            ),
            name=process.name,
            bundle=devices.bundle(number),
        )
        for number, process in enumerate(processes)
    )
    return DeviceActors(devices, tuple(workers))


def _run_name(config: Config) -> str:
    """Prefix of the names that Ray's tools show for the processes and devices of a run."""
    return f"run {config.run.name}"


def _samplers(config: Config) -> list[Process]:
    """The processes that only sample."""
    devices = config.plan.devices_per_sampler
    return [
        Process(SamplerActor, devices, f"sampler {number}", (config,))
        for number in range(config.plan.num_samplers)
    ]


@dataclass(frozen=True)
class SamplerActors(DeviceActors):
    """The sampler processes of a command that does not train.

    Attributes:
        samplers: one per actor.
    """

    samplers: list[SamplerWorker]

    @staticmethod
    def spawn(config: Config) -> SamplerActors:
        """Requests the processes from Ray."""
        found = _spawn_together(config, _samplers(config), learner=False)
        samplers = [cast("SamplerWorker", worker) for worker in found.workers]
        return SamplerActors(found.devices, found.workers, samplers)

    async def start(self, sizes: Sizes) -> None:
        """Compiles the programs of all samplers for these sizes; see `started` for errors."""
        await self.started()
        await asyncio.gather(*(sampler.prepare(sizes) for sampler in self.samplers))


@dataclass(frozen=True)
class ExportActors(DeviceActors):
    """The exporter's process.

    Attributes:
        exporter: the methods of `actors.exporter_actor.ExporterActor`.
    """

    exporter: RayWorker

    @staticmethod
    def spawn(config: Config, *, described: Config, examples: Sequence[Completion]) -> ExportActors:
        """Requests the process from Ray; see `actors.exporter_actor.ExporterActor`."""
        args = (config, described, tuple(examples))
        process = Process(ExporterActor, config.plan.learner_devices, "exporter", args)
        found = _spawn_together(config, [process])
        return ExportActors(found.devices, found.workers, found.workers[0])


@dataclass(frozen=True)
class RunActors(DeviceActors):
    """All processes of a training run.

    Attributes:
        samplers: in a colocated run, the learner's worker.
        learner: the learner's process.
        scorer: hosts the reward processes.
    """

    samplers: list[SamplerWorker]
    learner: LearnerWorker
    scorer: ScorerWorker

    @staticmethod
    def spawn(config: Config) -> RunActors:
        """Requests the processes from Ray."""
        colocated = config.plan.placement == "colocated"
        cls = ColocatedActor if colocated else LearnerActor
        learner = Process(cls, config.plan.learner_devices, "learner", (config,))
        found = _spawn_together(config, [learner, *([] if colocated else _samplers(config))])
        workers = found.workers
        return RunActors(
            found.devices,
            workers,
            [cast("SamplerWorker", worker) for worker in (workers if colocated else workers[1:])],
            cast("LearnerWorker", workers[0]),
            spawn_scorer(config),
        )

    @property
    def one_process(self) -> bool:
        """Whether sampler and learner are the same process."""
        return len(self.workers) == 1

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        self.scorer.kill()
        super().kill()


def spawn_scorer(config: Config) -> ScorerWorker:
    """Starts the host of the reward processes on this machine, where the run folder is."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    start = partial(
        spawn,
        RewardActor,
        config.rewards,
        str(RunFolder.of(config).rewards_log),
        lease=device_free_lease(),
        name=f"{_run_name(config)}: rewards",
        strategy=here,
        threads=_CONCURRENT_SCORES,
    )
    return cast("ScorerWorker", RayScorer(start, name="rewards"))
