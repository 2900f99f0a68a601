"""The start of runs on fake devices with given speeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import configs
from configs.load import load_config
from configs.schema import Config
from pipeline.contracts.builds import Building, Ready
from pipeline.contracts.cache_folder import CACHE_VARIABLE
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import LearnerSpeed, SamplerSpeed
from pipeline.plan.calibration import CalibrationStart, calibrate
from pipeline.plan.size_choice import Calibrated
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.run.records import Console, Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import FakeClock, FakeTracker

ROW = 192
ROOT = Path(configs.__file__).parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def config(folder: Path, **changes: object) -> Config:
    """The demo on one device, with 64 rollouts per step and sizes to be chosen."""
    settings = {
        "run.dir": folder,
        "plan.fixed": "false",
        "plan.placement": "colocated",
        "plan.samplers": "none",
        "plan.sampler_devices": "none",
        "plan.learner_devices": 1,
        "plan.slots": "none",
        "plan.micro_batch_tokens": "none",
        "rollout.prompts_per_step": 8,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return load_config(ROOT / "configs/demo.toml", [(k, str(v)) for k, v in settings.items()])


@dataclass
class Device:
    """Sampler and learner of a process whose programs take the seconds of `segment` and `batch`."""

    config: Config
    clock: FakeClock = field(default_factory=FakeClock)
    segment: Callable[[int], float] = lambda slots: 0.01 + 0.001 * slots
    batch: Callable[[int], float] = lambda rows: 0.05 + 0.02 * rows
    most: Sizes = field(default_factory=lambda: Sizes(10**6, 10**9))
    prepare_s: float = 1.0
    name: str = "1 x cpu"
    sizes: Sizes | None = None
    asked: list[Sizes] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)

    async def prepare(self, sizes: Sizes) -> Ready:
        self.asked.append(sizes)
        self.clock.seconds += self.prepare_s
        self.sizes = sizes
        return Ready()

    async def building(self) -> Building:
        return Building()

    async def sampler_speed(self) -> SamplerSpeed:
        assert self.sizes is not None
        slots = self.sizes.slots
        if slots > self.most.slots:
            raise OutOfMemory("generate", "full")
        self.measured.append(f"{slots} slots")
        plan = sized(self.config, self.sizes).plan
        return SamplerSpeed(
            self.name, {n: self.segment(n) for n in plan.slot_ladder}, {416: 0.002}, {slots: 0.001}
        )

    async def learner_speed(self) -> LearnerSpeed:
        assert self.sizes is not None
        rows = self.sizes.micro_batch_tokens // ROW
        if self.sizes.micro_batch_tokens > self.most.micro_batch_tokens:
            raise OutOfMemory("update", "full")
        self.measured.append(f"{rows} rows")
        return LearnerSpeed(self.name, {n: self.batch(n) for n in {rows, 1}})


@dataclass
class Small(Device):
    """Fits 20 slots; larger ones fail when it is prepared."""

    async def prepare(self, sizes: Sizes) -> Ready:
        if sizes.slots > 20:
            raise OutOfMemory("generate", "does not compile")
        return await super().prepare(sizes)


@dataclass
class Start:
    """The start of a run with such a device."""

    config: Config
    device: Device
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = RunFolder.of(self.config)
        self.beginning = CalibrationStart.of(self.config, self.folder.plan)
        self.controller = SizeController(self.config, self.beginning.sizes, self.said.append)

    def run(self) -> Calibrated | None:
        worker = Worker("both", self.device)

        async def scenario() -> Calibrated | None:
            await self.controller.start([worker])
            return await calibrate(
                self.controller,
                self.beginning,
                sampler=(worker, self.device),
                learner=(worker, self.device),
                now=self.device.clock,
            )

        return asyncio.run(scenario())

    def journal(self) -> list[dict[str, Any]]:
        self.folder.create(self.config)
        self.controller.record(Records(self.folder, FakeTracker(), Console(total=None, done=0)))
        self.folder.close()
        return list(self.folder.entries())


def start(folder: Path, device: Callable[[Config], Device] = Device, **changes: object) -> Start:
    made = config(folder, **changes)
    return Start(made, device(made))


def chosen(run: Start) -> Sizes:
    found = run.run()
    assert found is not None
    assert found.choice.sizes == run.controller.in_force
    return found.choice.sizes
