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
from pipeline.contracts.speeds import Speeds
from pipeline.plan.calibration import CalibrationStart, calibrate
from pipeline.plan.size_choice import StepTimes
from pipeline.plan.size_controller import SizeController, Worker
from pipeline.run.console import Console
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import FakeClock, FakeTracker

ROW = 192
ROOT = Path(configs.__file__).parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def config(folder: Path, **changes: object) -> Config:
    """The demo on one device, with 64 rollouts per step and sizes to be chosen.

    Prompts are not shared, so that the rollouts of a step fill 14 rows.
    """
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
        "learner.share_prefix": "false",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return load_config(ROOT / "configs/demo.toml", [(k, str(v)) for k, v in settings.items()])


@dataclass
class Device:
    """Sampler and learner of a process whose programs take the seconds of `segment` and `batch`.

    Attributes:
        most: larger sizes run out of memory while they are measured.
        compiles: larger ones do so when they are compiled.
        measured: sizes, in the order of the measurements.
    """

    config: Config
    segment: Callable[[int], float] = lambda slots: 0.01 + 0.001 * slots
    batch: Callable[[int], float] = lambda rows: 0.05 + 0.02 * rows
    most: Sizes = field(default_factory=lambda: Sizes(10**6, 10**9))
    compiles: Sizes = field(default_factory=lambda: Sizes(10**6, 10**9))
    prepare_s: float = 1.0
    name: str = "1 x cpu"
    clock: FakeClock = field(default_factory=FakeClock)
    sizes: Sizes = field(default_factory=lambda: Sizes(0, 0))
    measured: list[str] = field(default_factory=list)

    async def prepare(self, sizes: Sizes) -> Ready:
        self._fit(sizes, self.compiles)
        self.clock.seconds += self.prepare_s
        self.sizes = sizes
        return Ready()

    @staticmethod
    def _fit(sizes: Sizes, most: Sizes) -> None:
        if sizes.slots > most.slots:
            raise OutOfMemory("generate", "full")
        if sizes.micro_batch_tokens > most.micro_batch_tokens:
            raise OutOfMemory("update", "full")

    async def building(self) -> Building:
        return Building()

    async def sampler_speed(self) -> Speeds:
        slots = self.sizes.slots
        self._fit(Sizes(slots, 0), self.most)
        self.measured.append(f"{slots} slots")
        ladder = sized(self.config, self.sizes).plan.slot_ladder
        return Speeds(self.name, {n: self.segment(n) for n in ladder}, {416: 0.002}, {slots: 0.001})

    async def learner_speed(self) -> Speeds:
        self._fit(Sizes(0, self.sizes.micro_batch_tokens), self.most)
        rows = self.sizes.micro_batch_tokens // ROW
        self.measured.append(f"{rows} rows")
        return Speeds(self.name, micro_batch_s={n: self.batch(n) for n in {rows, 1}})


@dataclass
class Start:
    """The start of a run with such a device; `begins` replaces the planned or cached sizes."""

    device: Device
    begins: Sizes | None = None
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.device.config
        self.folder = RunFolder.of(self.config)
        self.beginning = CalibrationStart.of(self.config, self.folder.plan)
        if self.begins is not None:
            self.beginning = CalibrationStart(self.begins, self.beginning.case)
        self.controller = SizeController(
            self.config, self.beginning.sizes, Console(write=self.said.append)
        )

    def run(self) -> StepTimes | None:
        worker = Worker("both", self.device)

        async def scenario() -> StepTimes | None:
            await self.controller.start([worker])
            return await calibrate(
                self.controller,
                self.beginning,
                sampler=(worker, self.device),
                learner=(worker, self.device),
                now=self.device.clock,
            )

        return asyncio.run(scenario())

    def chosen(self) -> Sizes:
        """Runs; the sizes in force after it, which are the best measured ones."""
        times = self.run()
        assert times is not None
        assert times.best == self.controller.in_force
        return self.controller.in_force

    def journal(self) -> list[dict[str, Any]]:
        self.folder.create(self.config)
        self.controller.record(Records(self.folder, FakeTracker(), Console()))
        self.folder.close()
        return list(self.folder.entries())


def start(folder: Path, *, begins: Sizes | None = None, **changes: Any) -> Start:
    """A start; `changes` are of the `Device`, or of the configuration, as plan__slots."""
    settings = {name: changes.pop(name) for name in list(changes) if "__" in name}
    return Start(Device(config(folder, **settings), **changes), begins)
