"""Groups of Ray actors that get their devices together; the one place that applies `ray.remote`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.colocated_actor import ColocatedActor
from actors.exporter_actor import ExporterActor
from actors.handles import (
    ColocatedHandle,
    ExporterHandle,
    Handle,
    LearnerHandle,
    ModelHandle,
    SamplerHandle,
    ScorerHandle,
)
from actors.learner_actor import LearnerActor
from actors.placement import NO_DEVICES, Lease, Reservation, lease
from actors.reward_actor import RewardActor
from actors.sampler_actor import SamplerActor
from configs.schema import Config
from pipeline.plan.sizes import Sizes
from pipeline.run.run_folder import RunFolder
from pipeline.types import Completion

# One works, one may write a trace, one answers `abort`, `building` and `heartbeat` meanwhile.
_THREADS = 3
# Rollouts that have ended are scored in calls of their own.
_CONCURRENT_SCORES = 10_000


def spawn(
    cls: type, *args: Any, lease: Lease, name: str, strategy: Any = None, threads: int = 1
) -> Any:
    """Starts a Ray actor of a plain class with the lease's resources; Ray itself never restarts it.

    `name` is shown by Ray's tools, and unique in this process's job.
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


Process = tuple[type, int, str, tuple[Any, ...]]
"""Class of a process with devices, their number, its name in Ray's tools after that of the run, and
the arguments of the constructor."""


@dataclass(frozen=True)
class DeviceActors:
    """Ray actors that get their devices together or not at all."""

    devices: Reservation
    workers: Sequence[Handle]

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        for worker in self.workers:
            worker.kill()
        self.devices.release()


@dataclass(frozen=True)
class ModelActors(DeviceActors):
    """Ray actors of a run: each holds the model."""

    workers: Sequence[ModelHandle]

    async def started(self) -> None:
        """Returns when the processes have been started and have found the model on their nodes.

        Raises:
            FileNotFoundError: if the model's files are missing on a node.
            ValueError: if they cannot be used, or differ between nodes.
            WorkerDied: if a process died.
        """
        found = await asyncio.gather(*(worker.find_model() for worker in self.workers))
        for worker, fingerprint in zip(self.workers, found, strict=True):
            if fingerprint != found[0]:
                raise ValueError(
                    f"model.path: the weights on {await worker.node()} differ from those on "
                    f"{await self.workers[0].node()}; put the same files on both, or name a "
                    "revision: hf://OWNER/NAME@REVISION"
                )


def _spawn_together(
    config: Config, processes: Sequence[Process], *, learner: bool = True
) -> tuple[Reservation, list[tuple[Any, str]]]:
    """Requests processes from Ray; they get devices in their order, and may have to wait.

    Returns the devices, and the arguments of a `Handle` for each process. With a learner the first
    process is on the node of this one.
    """
    leases = [lease(config.plan, count) for _, count, _, _ in processes]
    devices = Reservation(_run_name(config), leases, learner=learner)
    started = []
    for number, (cls, _, name, args) in enumerate(processes):
        actor = spawn(
            cls,
            *args,
            lease=leases[number],
            name=f"{_run_name(config)}: {name}",
            strategy=devices.strategy(number),
            threads=_THREADS,
        )
        started.append((actor, name))
    return devices, started


def _run_name(config: Config) -> str:
    """Prefix of the names that Ray's tools show for the processes and devices of a run."""
    return f"run {config.run.name}"


def _samplers(config: Config) -> list[Process]:
    """The processes that only sample."""
    devices = config.plan.devices_per_sampler
    return [
        (SamplerActor, devices, f"sampler {number}", (config,))
        for number in range(config.plan.num_samplers)
    ]


@dataclass(frozen=True)
class SamplerActors(ModelActors):
    """The sampler processes of a command that does not train."""

    samplers: Sequence[SamplerHandle]

    @staticmethod
    def spawn(config: Config) -> SamplerActors:
        """Requests the processes from Ray."""
        devices, started = _spawn_together(config, _samplers(config), learner=False)
        samplers = [SamplerHandle(*one) for one in started]
        return SamplerActors(devices, samplers, samplers)

    async def start(self, sizes: Sizes) -> None:
        """Compiles the programs of all samplers for these sizes; see `started` for errors."""
        await self.started()
        await asyncio.gather(*(sampler.prepare(sizes) for sampler in self.samplers))


@dataclass(frozen=True)
class ExportActors(DeviceActors):
    """The exporter's process."""

    exporter: ExporterHandle

    @staticmethod
    def spawn(config: Config, *, described: Config, examples: Sequence[Completion]) -> ExportActors:
        """Requests the process from Ray; see `actors.exporter_actor.ExporterActor`."""
        args = (config, described, tuple(examples))
        process = (ExporterActor, config.plan.learner_devices, "exporter", args)
        reserved, (started,) = _spawn_together(config, [process])
        exporter = ExporterHandle(*started)
        return ExportActors(reserved, [exporter], exporter)


@dataclass(frozen=True)
class RunActors(ModelActors):
    """All processes of a training run; in a colocated one sampler and learner are the same."""

    samplers: Sequence[SamplerHandle]
    learner: LearnerHandle
    scorer: ScorerHandle

    @staticmethod
    def spawn(config: Config) -> RunActors:
        """Requests the processes from Ray."""
        colocated = config.plan.placement != "split"
        cls = ColocatedActor if colocated else LearnerActor
        learner = (cls, config.plan.learner_devices, "learner", (config,))
        others = [] if colocated else _samplers(config)
        devices, (first, *rest) = _spawn_together(config, [learner, *others])
        scorer = spawn_scorer(config)
        if colocated:
            both = ColocatedHandle(*first)
            return RunActors(devices, [both], [both], both, scorer)
        handle, samplers = LearnerHandle(*first), [SamplerHandle(*one) for one in rest]
        return RunActors(devices, [handle, *samplers], samplers, handle, scorer)

    @property
    def one_process(self) -> bool:
        """Whether sampler and learner are the same process."""
        return len(self.workers) == 1

    def kill(self) -> None:
        """Ends all processes and releases their devices."""
        self.scorer.kill()
        super().kill()


def spawn_scorer(config: Config) -> ScorerHandle:
    """Starts the host of the reward processes on this machine, where the run folder is."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = spawn(
        RewardActor,
        config.rewards,
        str(RunFolder.of(config).rewards_log),
        lease=NO_DEVICES,
        name=f"{_run_name(config)}: rewards",
        strategy=here,
        threads=_CONCURRENT_SCORES,
    )
    return ScorerHandle(actor, "rewards")
