"""A run of fake processes whose sizes may change, for the tests of the size controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from configs.schema import Config
from pipeline.contracts.builds import Building, Built, Ready
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.sizes import Sizes, WorkerPhase
from pipeline.contracts.workers import Sampler
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.rollout.workers import RetryingWorker
from pipeline.run.run_folder import RunFolder
from tests.fakes import (
    Disk,
    Killed,
    Process,
    make_config,
    make_data,
)

ROW = 88
WHOLE, FEWER_SLOTS, FEWER_ROWS = Sizes(8, 4 * ROW), Sizes(6, 4 * ROW), Sizes(8, 3 * ROW)


def config(folder: Path, *, fixed: bool = False, **tables: Any) -> Config:
    sizes = {"slots": 8, "micro_batch_tokens": 4 * ROW}
    common: dict[str, Any] = {
        "run": {"phases": ["sft", "grpo"]},
        "sft": {"train": {"path": "demonstrations.jsonl"}, "completion_column": "text", "steps": 1},
        "data": {"validation": {"path": "validation.jsonl"}},
        "eval": {"every_steps": 2},
        "budget": {"steps": 4},
    }
    plan = {"platform": "cpu", "placement": "split", "fixed": fixed, **sizes}
    return make_config(folder, plan=plan, **common | tables)


def process(config: Config, disk: Disk) -> Process:
    return Process(config, disk=disk, data=make_data(validation=3, sft=4))


def full(phase: WorkerPhase, then: Callable[[], None] | None = None) -> Callable[[], None]:
    def run_out() -> None:
        if then is not None:
            then()
        raise OutOfMemory(phase, "RESOURCE_EXHAUSTED: so many bytes")

    return run_out


def plan_of(folder: RunFolder) -> dict[str, Any]:
    found = folder.plan
    assert found is not None
    return found


def die() -> None:
    raise Killed


@dataclass
class Compiling:
    """A process that compiles programs; too many slots do not compile."""

    most: int
    asked: list[int] = field(default_factory=list)
    built: tuple[Built, ...] = ()

    async def prepare(self, sizes: Sizes) -> Ready:
        self.asked.append(sizes.slots)
        if sizes.slots > self.most:
            raise OutOfMemory("generate", f"segment {sizes.slots} does not fit")
        new = tuple(
            Built(f"{name} {sizes.slots}", 1.5, cached=name == "fill")
            for name in ("segment", "fill")
        )
        self.built += new
        return Ready(2.0, new)

    async def building(self) -> Building:
        return Building(self.built, 5)


async def hold(controller: SizeController, worker: Worker, work: Callable[[], Any]) -> Any:
    """A call of the worker that runs `work`."""
    setattr(worker.process, "task", work)  # noqa: B010  # a method that no protocol has
    target = cast("Sampler", worker.process)
    return await RetryingWorker(target, worker, controller).task()
