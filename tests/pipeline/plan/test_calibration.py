"""Measuring sizes at the start: candidates, choice and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.schema import Config
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds
from pipeline.plan.calibration import CalibrationStart
from pipeline.plan.forecast import CALIBRATION_SHARE, calibration_share_s
from pipeline.plan.size_choice import SizeLadder
from tests.pipeline.plan.calibration_runs import (
    ROOT,
    ROW,
    Device,
    Small,
    cache,
    chosen,
    config,
    start,
)

__all__ = ["cache"]


def test_a_run_starts_with_the_largest_useful_sizes(tmp_path: Path):
    beginning = CalibrationStart.of(config(tmp_path), None)
    assert beginning.ladder is not None
    assert beginning.ladder.slots == (64, 32, 16, 8, 4, 2, 1)
    assert beginning.ladder.rows[-3:] == (4, 2, 1)
    assert beginning.sizes == Sizes(64, beginning.ladder.rows[0] * ROW)
    assert beginning.sizes.micro_batch_tokens < 64 * 88 + ROW


def test_configured_sizes_are_upper_bounds(tmp_path: Path):
    made = config(tmp_path, plan__slots=12, plan__micro_batch_tokens=3 * ROW)
    beginning = CalibrationStart.of(made, None)
    assert beginning.ladder == SizeLadder((12, 8, 4, 2, 1), (3, 2, 1))
    assert beginning.sizes == Sizes(12, 3 * ROW)


@pytest.mark.parametrize("slots", [64, 32, 16, 8])
def test_slots_above_which_a_device_slows_down_are_chosen(tmp_path: Path, slots: int):
    def device(config: Config) -> Device:
        # Constant time up to `slots`; beyond, slower than sequential batches of `slots`.
        return Device(config, segment=lambda n: 0.01 if n <= slots else 0.03 * n / slots)

    assert chosen(start(tmp_path, device)).slots == slots


def test_slots_are_chosen_for_the_rollouts_of_a_step(tmp_path: Path):
    """More slots generate more tokens per second, but a step has fewer rollouts."""

    def device(config: Config) -> Device:
        return Device(config, segment=lambda n: 0.01 + 1e-6 * n)

    run = start(tmp_path, device, rollout__prompts_per_step=3)
    assert chosen(run).slots == 24
    assert run.device.measured[0] == "24 slots"


@pytest.mark.parametrize("rows", [14, 8, 4])
def test_a_less_efficient_micro_batch_is_not_chosen(tmp_path: Path, rows: int):
    def device(config: Config) -> Device:
        return Device(config, batch=lambda n: 0.2 + 0.01 * n if n <= rows else 0.2 * n)

    assert chosen(start(tmp_path, device)).micro_batch_tokens == rows * ROW


def test_out_of_memory_while_measuring_is_recorded_and_continues(tmp_path: Path):
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
    assert any("out of memory" in line for line in run.said)


def test_smaller_sizes_are_measured_until_they_fit_even_beyond_the_share(
    tmp_path: Path,
):
    def device(config: Config) -> Device:
        return Device(config, most=Sizes(16, 4 * ROW), prepare_s=10.0)

    run = start(tmp_path, device, plan__calibration_share=0.001)
    assert chosen(run) == Sizes(16, 4 * ROW)
    assert run.device.measured == ["16 slots", "4 rows"]


def test_sizes_that_did_not_compile_at_the_start_are_not_measured(tmp_path: Path):
    run = start(tmp_path, lambda config: Small(config, segment=lambda _: 0.01))
    assert chosen(run).slots == 16
    assert run.device.measured[0] == "16 slots"
    assert run.journal()[-1]["speeds"]["full_slots"] == [64, 32]


def test_measuring_stays_within_its_share_of_the_budget(tmp_path: Path):
    def device(config: Config) -> Device:
        # The smallest sizes are the fastest, so all would be measured.
        return Device(config, segment=lambda n: n**2.0, batch=lambda n: n**2.0, prepare_s=10.0)

    for share, budget in ((0.02, 3600.0), (0.004, 7200.0)):
        changes = {"budget__steps": "none", "budget__time": "2h"} if budget == 7200.0 else {}
        run = start(
            tmp_path / str(share),
            device,
            plan__calibration_share=share,
            learner__schedule="constant",
            **changes,
        )
        assert calibration_share_s(run.config) == pytest.approx(share * budget)
        began = 10.0  # the start
        run.run()
        assert began < run.device.clock.seconds <= began + share * budget
        (tmp_path / "cache").rename(tmp_path / f"cache {share}")
    full = start(tmp_path / "full", device, plan__calibration_share=0.5)
    assert chosen(full) == Sizes(1, ROW)


def test_a_share_of_zero_uses_the_planned_sizes(tmp_path: Path):
    run = start(tmp_path, plan__calibration_share=0)
    assert run.beginning.case is None
    assert run.run() is None
    assert run.device.measured == []
    assert run.controller.in_force.slots <= 64


def test_a_resume_uses_the_chosen_sizes_without_measuring(tmp_path: Path):
    first = start(tmp_path, lambda config: Device(config, segment=lambda n: 0.01 * n))
    sizes = chosen(first)
    first.journal()
    plan = first.folder.plan
    assert plan is not None
    assert plan["in_force"] == sizes.to_json()
    again = start(tmp_path)
    assert again.beginning == CalibrationStart(sizes)
    assert again.run() is None
    assert again.device.measured == []


def test_fixed_sizes_are_not_measured(tmp_path: Path):
    fixed = replace_plan(config(tmp_path), fixed=True, slots=8, micro_batch_tokens=ROW)
    assert CalibrationStart.of(fixed, None) == CalibrationStart(Sizes(8, ROW))
    with pytest.raises(ValueError, match=r"calibration_share.*plan\.fixed = true"):
        load_config(ROOT / "configs/demo.toml", [("plan.calibration_share", "0.1")])


def replace_plan(config: Config, **update: Any) -> Config:
    return config.model_copy(update={"plan": config.plan.model_copy(update=update)})


def test_a_gpu_requires_configured_sizes(tmp_path: Path):
    gpu = replace_plan(config(tmp_path), platform="gpu")
    with pytest.raises(ValueError, match=r"set plan\.slots"):
        CalibrationStart.of(gpu, None)
    given = replace_plan(gpu, slots=8, micro_batch_tokens=ROW)
    assert CalibrationStart.of(given, None) == CalibrationStart(Sizes(8, ROW))
    asked = [("plan.fixed", "false"), ("plan.platform", "gpu"), ("plan.calibration_share", "0.1")]
    with pytest.raises(ValueError, match=r"calibration_share = 0\.1: has no effect on gpu"):
        load_config(ROOT / "configs/demo.toml", asked)


def test_speeds_round_trip_through_json():
    speeds = Speeds("d", {8: 0.5, 16: 0.7}, {64: 0.1}, {16: 0.2}, {4: 1.5}, (32,), (8,))
    assert Speeds.of_json(json.loads(json.dumps(speeds.to_json()))) == speeds


def test_the_default_calibration_share_is_two_percent(tmp_path: Path):
    assert calibration_share_s(config(tmp_path)) == CALIBRATION_SHARE * 3600 == 72
    until = {"budget__steps": "none", "budget__until": "2030-01-01T10:00+00:00"}
    dated = config(tmp_path, learner__schedule="constant", **until)
    end = dated.budget.until_s
    assert end is not None
    assert calibration_share_s(dated, now_s=end - 7200) == 144
    assert calibration_share_s(dated, now_s=end + 1) == 0
