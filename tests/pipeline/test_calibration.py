"""Measuring sizes at the start: which are tried, which is chosen, what is kept and written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import configs
from configs.load import load_config
from configs.schema import Config
from pipeline.balance import Balance, Worker
from pipeline.cache_folder import CACHE_VARIABLE
from pipeline.calibration import Beginning, Calibrated, calibrate
from pipeline.plan import kept
from pipeline.plan.building import Building, Ready
from pipeline.plan.calibrating import SHARE, share_s
from pipeline.plan.ladder import Ladder
from pipeline.plan.out_of_memory import OutOfMemory
from pipeline.plan.sizes import Sizes, sized
from pipeline.plan.speed import LearnerSpeed, SamplerSpeed, Speeds
from pipeline.records import Console, Records
from pipeline.run_dir import RunFolder
from tests.fakes import FakeClock, FakeTracker

ROW = 192
ROOT = Path(configs.__file__).parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def config(folder: Path, **changes: object) -> Config:
    """The demo's, colocated on one device, with 64 rollouts a step and sizes that are open."""
    settings = {
        "run.dir": folder,
        "plan.fixed": "false",
        "plan.placement": "colocated",
        "plan.samplers": "none",
        "plan.sampler_devices": "none",
        "plan.learner_devices": 1,
        "plan.rollout_rows": "none",
        "plan.micro_batch_tokens": "none",
        "rollout.prompts_per_step": 8,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return load_config(ROOT / "configs/demo.toml", [(k, str(v)) for k, v in settings.items()])


@dataclass
class Device:
    """Sampler and learner of a process whose programs take what `segment` and `batch` say."""

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

    async def drawing_speed(self) -> SamplerSpeed:
        assert self.sizes is not None
        slots = self.sizes.rollout_rows
        if slots > self.most.rollout_rows:
            raise OutOfMemory("generate", "full")
        self.measured.append(f"{slots} slots")
        plan = sized(self.config, self.sizes).plan
        return SamplerSpeed(
            self.name, {n: self.segment(n) for n in plan.slots}, {416: 0.002}, {slots: 0.001}
        )

    async def learning_speed(self) -> LearnerSpeed:
        assert self.sizes is not None
        rows = self.sizes.micro_batch_tokens // ROW
        if self.sizes.micro_batch_tokens > self.most.micro_batch_tokens:
            raise OutOfMemory("update", "full")
        self.measured.append(f"{rows} rows")
        return LearnerSpeed(self.name, {n: self.batch(n) for n in {rows, 1}})


@dataclass
class Small(Device):
    """Has room for 20 slots, and says so when it is prepared."""

    async def prepare(self, sizes: Sizes) -> Ready:
        if sizes.rollout_rows > 20:
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
        self.beginning = Beginning.of(self.config, self.folder)
        self.balance = Balance.of(
            self.config, self.folder, say=self.said.append, sizes=self.beginning.sizes
        )

    def run(self) -> Calibrated | None:
        worker = Worker("both", self.device)

        async def scenario() -> Calibrated | None:
            await self.balance.start([worker])
            return await calibrate(
                self.balance,
                self.beginning,
                sampler=(worker, self.device),
                learner=(worker, self.device),
                now=self.device.clock,
            )

        return asyncio.run(scenario())

    def journal(self) -> list[dict[str, Any]]:
        self.folder.create(self.config)
        self.balance.record(Records(self.folder, FakeTracker(), Console(total=None, done=0)))
        self.folder.close()
        lines = (self.folder.path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def start(folder: Path, device: Callable[[Config], Device] = Device, **changes: object) -> Start:
    made = config(folder, **changes)
    return Start(made, device(made))


def chosen(run: Start) -> Sizes:
    found = run.run()
    assert found is not None
    assert found.choice.sizes == run.balance.sizes
    return found.choice.sizes


def test_a_run_begins_with_the_largest_sizes_that_are_of_use(tmp_path: Path):
    beginning = Beginning.of(config(tmp_path), RunFolder(tmp_path / "demo"))
    assert beginning.ladder is not None
    assert beginning.ladder.slots == (64, 32, 16, 8, 4, 2, 1)
    assert beginning.ladder.rows[-3:] == (4, 2, 1)
    assert beginning.sizes == Sizes(64, beginning.ladder.rows[0] * ROW)
    assert beginning.sizes.micro_batch_tokens < 64 * 88 + ROW


def test_what_is_given_is_the_most(tmp_path: Path):
    made = config(tmp_path, plan__rollout_rows=12, plan__micro_batch_tokens=3 * ROW)
    beginning = Beginning.of(made, RunFolder(tmp_path / "demo"))
    assert beginning.ladder == Ladder((12, 8, 4, 2, 1), (3, 2, 1))
    assert beginning.sizes == Sizes(12, 3 * ROW)


@pytest.mark.parametrize("slots", [64, 32, 16, 8])
def test_a_device_that_slows_down_above_some_slots_gets_these(tmp_path: Path, slots: int):
    def device(config: Config) -> Device:
        # As fast for any number up to there, and slower than in turns beyond.
        return Device(config, segment=lambda n: 0.01 if n <= slots else 0.03 * n / slots)

    assert chosen(start(tmp_path, device)).rollout_rows == slots


def test_slots_are_chosen_for_the_steps_own_rollouts(tmp_path: Path):
    """More slots draw more tokens a second, and a step has not so many rollouts."""

    def device(config: Config) -> Device:
        return Device(config, segment=lambda n: 0.01 + 1e-6 * n)

    run = start(tmp_path, device, rollout__prompts_per_step=3)
    assert chosen(run).rollout_rows == 24
    assert run.device.measured[0] == "24 slots"


@pytest.mark.parametrize("rows", [14, 8, 4])
def test_a_micro_batch_that_is_slower_for_its_size_is_not_taken(tmp_path: Path, rows: int):
    def device(config: Config) -> Device:
        return Device(config, batch=lambda n: 0.2 + 0.01 * n if n <= rows else 0.2 * n)

    assert chosen(start(tmp_path, device)).micro_batch_tokens == rows * ROW


def test_running_out_of_memory_on_the_ladder_is_survived_and_recorded(tmp_path: Path):
    def device(config: Config) -> Device:
        return Device(
            config,
            segment=lambda _: 0.01,
            batch=lambda n: 0.1 + 0.001 * n,
            most=Sizes(16, 4 * ROW),
        )

    run = start(tmp_path, device)
    assert chosen(run) == Sizes(16, 4 * ROW)
    entry = run.journal()[-1]
    assert entry["event"] == "calibrated"
    assert entry["speeds"]["full_slots"] == [64, 32]
    assert 8 in entry["speeds"]["full_rows"]
    assert "64" not in entry["sampling_s"]
    assert any("no room" in line for line in run.said)


def test_a_run_does_not_begin_with_sizes_that_have_no_room_because_its_share_is_used_up(
    tmp_path: Path,
):
    def device(config: Config) -> Device:
        return Device(config, most=Sizes(16, 4 * ROW), prepare_s=10.0)

    run = start(tmp_path, device, plan__calibration_share=0.001)
    assert chosen(run) == Sizes(16, 4 * ROW)
    assert run.device.measured == ["16 slots", "4 rows"]


def test_nothing_that_has_no_room_is_measured_by_who_has_said_so_at_the_start(tmp_path: Path):
    run = start(tmp_path, lambda config: Small(config, segment=lambda _: 0.01))
    assert chosen(run).rollout_rows == 16
    assert run.device.measured[0] == "16 slots"
    assert run.journal()[-1]["speeds"]["full_slots"] == [64, 32]


def test_the_share_of_the_budget_is_kept(tmp_path: Path):
    def device(config: Config) -> Device:
        # The smallest sizes are the best, so all would be measured.
        return Device(config, segment=float, batch=lambda n: n**2.0, prepare_s=10.0)

    for share, budget in ((0.02, 3600.0), (0.004, 7200.0)):
        changes = {"budget__steps": "none", "budget__time": "2h"} if budget == 7200.0 else {}
        run = start(
            tmp_path / str(share),
            device,
            plan__calibration_share=share,
            learner__schedule="constant",
            **changes,
        )
        assert share_s(run.config) == pytest.approx(share * budget)
        began = 10.0  # the start itself
        run.run()
        assert began < run.device.clock.seconds <= began + share * budget
        (tmp_path / "cache").rename(tmp_path / f"cache {share}")
    full = start(tmp_path / "full", device, plan__calibration_share=0.5)
    assert chosen(full) == Sizes(1, ROW)


def test_a_share_of_zero_takes_what_is_planned(tmp_path: Path):
    run = start(tmp_path, plan__calibration_share=0)
    assert run.beginning.case is None
    assert run.run() is None
    assert run.device.measured == []
    assert run.balance.sizes.rollout_rows <= 64


def test_what_was_chosen_is_in_the_plan_and_a_resume_does_not_measure(tmp_path: Path):
    first = start(tmp_path, lambda config: Device(config, segment=lambda n: 0.01 * n))
    sizes = chosen(first)
    first.journal()
    plan = first.folder.plan
    assert plan is not None
    assert plan["in_force"] == sizes.to_json()
    again = start(tmp_path)
    assert again.beginning == Beginning(sizes)
    assert again.run() is None
    assert again.device.measured == []


def test_the_next_run_of_the_same_shapes_begins_with_what_was_measured(tmp_path: Path):
    slow = lambda config: Device(config, segment=lambda n: 0.01 if n <= 16 else 1.0)  # noqa: E731
    first = start(tmp_path / "a", slow)
    sizes = chosen(first)
    second = start(tmp_path / "b", slow)
    assert second.beginning.sizes == sizes
    assert chosen(second) == sizes
    # Only to see that it is the same device.
    assert second.device.measured == [f"{sizes.micro_batch_tokens // ROW} rows"]
    entries = [one.journal()[-1] for one in (first, second)]
    assert [entry["kept"] for entry in entries] == [False, True]
    assert entries[0]["speeds"] == entries[1]["speeds"]
    assert entries[0]["estimated"].keys() == {"sampling_s", "learning_s"}
    for what in ("sampling_s", "learning_s"):
        assert entries[0]["estimated"][what].keys() == entries[0][what].keys()
    # Another step: the same speeds, and another choice from them.
    third = start(tmp_path / "c", slow, rollout__prompts_per_step=4, plan__micro_batch_tokens=ROW)
    assert third.beginning.kept is not None


def test_what_a_run_had_no_time_to_measure_the_next_one_measures(tmp_path: Path):
    def device(config: Config) -> Device:
        return Device(config, batch=lambda n: 0.2 + 0.01 * n if n <= 4 else 0.2 * n, prepare_s=10.0)

    short = start(tmp_path / "a", device, plan__calibration_share=0.001)
    assert chosen(short).micro_batch_tokens == short.beginning.sizes.micro_batch_tokens
    long = start(tmp_path / "b", device, plan__calibration_share=0.5)
    assert (long.beginning.sizes, long.beginning.more) == (short.balance.sizes, True)
    found = chosen(long)
    assert found.micro_batch_tokens == 4 * ROW
    # Only what tells whether it is the same device is measured twice.
    twice = [what for what in long.device.measured if what in short.device.measured]
    assert twice == [f"{long.beginning.sizes.micro_batch_tokens // ROW} rows"]
    assert long.journal()[-1]["kept"] is False
    again = start(tmp_path / "c", device, plan__calibration_share=0.5)
    assert (again.beginning.sizes, again.beginning.more, chosen(again)) == (found, False, found)
    (tmp_path / "cache").rename(tmp_path / "other")
    assert chosen(start(tmp_path / "d", device, plan__calibration_share=0.5)) == found


def test_a_share_that_is_too_short_for_another_size_measures_none(tmp_path: Path):
    def device(config: Config) -> Device:
        return Device(
            config, batch=lambda n: 0.2 + 0.01 * n if n <= 4 else 0.2 * n, prepare_s=100.0
        )

    first = start(tmp_path / "a", device, plan__calibration_share=0.001)
    sizes = chosen(first)
    second = start(tmp_path / "b", device, plan__calibration_share=0.001)
    assert second.beginning.more
    assert chosen(second) == sizes
    assert second.device.measured == [f"{sizes.micro_batch_tokens // ROW} rows"]
    assert second.journal()[-1]["kept"] is True


def test_what_is_added_is_compared_with_what_was_measured_on_a_faster_day(tmp_path: Path):
    def device(config: Config, slower: float) -> Device:
        return Device(config, batch=lambda n: slower * (0.2 + 0.01 * n), prepare_s=10.0)

    first = start(tmp_path / "a", lambda one: device(one, 1.0), plan__calibration_share=0.001)
    chosen(first)
    second = start(tmp_path / "b", lambda one: device(one, 1.4), plan__calibration_share=0.5)
    chosen(second)
    found = second.journal()[-1]["speeds"]["micro_batch_s"]
    assert len(found) > len(first.journal()[-1]["speeds"]["micro_batch_s"])
    for rows, seconds in found.items():
        assert seconds == pytest.approx(1.4 * (0.2 + 0.01 * int(rows))), rows


def test_what_has_no_room_any_more_is_not_put_in_force_because_it_once_had(tmp_path: Path):
    first = start(tmp_path / "a", lambda config: Device(config, segment=lambda _: 0.01))
    assert chosen(first).rollout_rows == 64
    second = start(tmp_path / "b", lambda config: Small(config, segment=lambda _: 0.01))
    assert second.beginning.sizes.rollout_rows == 64
    assert chosen(second).rollout_rows == 16
    assert second.journal()[-1]["kept"] is False  # 16 slots had not been measured
    assert start(tmp_path / "c").beginning.sizes.rollout_rows == 16


@pytest.mark.parametrize("what", ["version", "sources", "machine", "shape", "memory"])
def test_another_program_or_machine_measures_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    start(tmp_path / "a").run()
    assert start(tmp_path / "b").beginning.kept is not None
    changes: dict[str, Any] = {}
    if what == "version":
        monkeypatch.setattr(kept, "versions", lambda: {"jax": "99"})
    elif what == "sources":
        monkeypatch.setattr(kept, "sources", lambda _: "other")
    elif what == "machine":
        monkeypatch.setattr(kept, "machine", lambda: {"processor": "other", "cores": 2})
    elif what == "shape":
        changes = {"rollout__max_new_tokens": 40}
    else:
        changes = {"plan__hbm_gib": 1.0}
    assert start(tmp_path / "b", **changes).beginning.kept is None


@pytest.mark.parametrize("what", ["name", "slower", "faster", "full"])
def test_speeds_of_another_device_are_not_used(tmp_path: Path, what: str):
    first = start(tmp_path / "a")
    sizes = chosen(first)
    changes: dict[str, Any] = {
        "name": {"name": "1 x TPU v9"},
        "slower": {"batch": lambda rows: 1.6 * (0.05 + 0.02 * rows)},
        "faster": {"batch": lambda rows: (0.05 + 0.02 * rows) / 1.6},
        "full": {"most": replace(sizes, micro_batch_tokens=sizes.micro_batch_tokens - 1)},
    }
    other = start(tmp_path / "b", lambda config: Device(config, **changes[what]))
    assert other.beginning.kept is not None
    chosen(other)
    entry = other.journal()[-1]
    assert entry["kept"] is False
    assert entry["speeds"]["device"] == other.device.name
    assert len(other.device.measured) > 2
    assert entry["speeds"]["full_slots"] == []
    # A little more or less is the weather.
    near = Device(other.config, batch=lambda rows: 1.2 * other.device.batch(rows))
    near.name, near.most = other.device.name, other.device.most
    third = start(tmp_path / "c", lambda _: near)
    chosen(third)
    assert third.journal()[-1]["kept"] is True


def test_a_file_that_is_damaged_or_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    start(tmp_path / "a").run()
    (file,) = (tmp_path / "cache/calibration").iterdir()
    file.write_text('{"speeds": {"device"', encoding="utf-8")
    assert start(tmp_path / "b").beginning.kept is None
    (tmp_path / "no folder").write_text("", encoding="utf-8")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "no folder"))
    assert chosen(start(tmp_path / "c")).rollout_rows > 0


def test_sizes_that_are_fixed_measure_nothing(tmp_path: Path):
    fixed = replace_plan(config(tmp_path), fixed=True, rollout_rows=8, micro_batch_tokens=ROW)
    assert Beginning.of(fixed, RunFolder(tmp_path / "demo")) == Beginning(Sizes(8, ROW))
    with pytest.raises(ValueError, match=r"calibration_share.*plan\.fixed = true"):
        load_config(ROOT / "configs/demo.toml", [("plan.calibration_share", "0.1")])


def replace_plan(config: Config, **update: Any) -> Config:
    return config.model_copy(update={"plan": config.plan.model_copy(update=update)})


def test_a_gpu_is_asked_for_its_sizes(tmp_path: Path):
    gpu = replace_plan(config(tmp_path), platform="gpu")
    with pytest.raises(ValueError, match=r"set plan\.rollout_rows"):
        Beginning.of(gpu, RunFolder(tmp_path / "demo"))
    given = replace_plan(gpu, rollout_rows=8, micro_batch_tokens=ROW)
    assert Beginning.of(given, RunFolder(tmp_path / "demo")) == Beginning(Sizes(8, ROW))
    asked = [("plan.fixed", "false"), ("plan.platform", "gpu"), ("plan.calibration_share", "0.1")]
    with pytest.raises(ValueError, match=r"calibration_share = 0\.1: measures nothing on gpu"):
        load_config(ROOT / "configs/demo.toml", asked)


def test_speeds_are_the_same_behind_json():
    speeds = Speeds("d", {8: 0.5, 16: 0.7}, {64: 0.1}, {16: 0.2}, {4: 1.5}, (32,), (8,))
    assert Speeds.of_json(json.loads(json.dumps(speeds.to_json()))) == speeds


def test_the_default_share_is_a_fiftieth(tmp_path: Path):
    assert share_s(config(tmp_path)) == SHARE * 3600 == 72
    until = {"budget__steps": "none", "budget__until": "2030-01-01T10:00+00:00"}
    dated = config(tmp_path, learner__schedule="constant", **until)
    end = dated.budget.until_s
    assert end is not None
    assert share_s(dated, now_s=end - 7200) == 144
    assert share_s(dated, now_s=end + 1) == 0
