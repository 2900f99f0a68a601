"""Measuring sizes at the start: where it begins, how it climbs, what is recorded and cached."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from pipeline.contracts.cache_folder import CACHE_VARIABLE
from pipeline.contracts.memory import NothingSmaller
from pipeline.contracts.sizes import Sizes
from pipeline.contracts.speeds import Speeds
from pipeline.plan import speed_cache
from pipeline.plan.calibration import CalibrationStart
from pipeline.plan.forecast import CALIBRATION_SHARE, calibration_share_s
from pipeline.plan.search.fitting import PlanCase, planned_sizes, with_plan
from pipeline.plan.size_choice import StepTimes
from tests.pipeline.plan.calibration_runs import ROOT, ROW, cache, config, start

__all__ = ["cache"]


def test_a_run_measures_the_planned_sizes_first(tmp_path: Path):
    run = start(tmp_path)
    sizes = planned_sizes(PlanCase.of(run.config))
    assert run.beginning.sizes == sizes
    run.run()
    planned = [f"{sizes.micro_batch_tokens // ROW} rows", f"{sizes.slots} slots"]
    assert run.device.measured[:2] == planned
    assert len(set(run.device.measured)) == len(run.device.measured) > 2


def test_configured_sizes_are_upper_bounds(tmp_path: Path):
    bounds: dict[str, Any] = {"plan__slots": 12, "plan__micro_batch_tokens": 3 * ROW}
    run = start(tmp_path, segment=lambda _: 0.01, batch=lambda _: 0.01, **bounds)
    assert run.chosen() == Sizes(12, 3 * ROW)


# --- climbing

TOKENS_PER_S = [
    (1077, 1558, 2359, 3681, 5738, 7559, 6220),
    (1424, 2171, 3445, 5441, 7375, 11129, 6878),
    (1027, 1540, 2671, 3654, 5263, 3478, 4915),
    (1189, 1756, 3037, 4193, 5616, 6618, 5251),
    (1118, 1752, 3503, 4012, 7326, 5668, 7152),
    (1007, 1381, 2566, 3398, 4226, 5981, 4462),
]
"""Recorded tokens a second of 1, 2, 4 to 64 slots: `launch.bench sweep` on two busy cores."""


@pytest.mark.parametrize("recorded", TOKENS_PER_S)
def test_from_any_size_the_climb_ends_within_2_percent_of_the_best_of_a_recorded_table(
    tmp_path: Path, recorded: tuple[int, ...]
):
    table = {2**n: 2**n * 32 / tokens for n, tokens in enumerate(recorded)}
    for begins in (1, 8, 28, 64):
        sizes = Sizes(begins, ROW)
        run = start(tmp_path / str(begins), begins=sizes, segment=lambda n: _at(table, n))
        found = run.chosen()
        assert run.beginning.case is not None
        speeds = Speeds("", table, {416: 0.002}, {64: 0.001}, {1: 1.0})
        times = StepTimes.of(run.beginning.case, speeds, run.beginning.case.lengths).slots
        assert times[found.slots] <= min(times.values()) / 0.98, begins


def _at(table: dict[int, float], size: int) -> float:
    """The seconds of a size; of one that is not in the table those of the next larger."""
    return table[min(other for other in table if other >= size)]


@pytest.mark.parametrize("best", [1, 2, 8, 16])
@pytest.mark.parametrize("begins", [1, 2, 8, 16])
def test_micro_batches_eight_times_larger_or_smaller_than_planned_are_found(
    tmp_path: Path, begins: int, best: int
):
    """Also with measurements that are off by up to 4%."""
    noise = random.Random(begins * best)

    def batch(rows: int) -> float:
        per_row = 1.2 ** abs(rows.bit_length() - best.bit_length())
        return rows * per_row * noise.uniform(0.96, 1.04)

    # 200 rollouts fill 42 rows: with each best size the remainder costs little.
    settings = {"plan__calibration_share": 0.5, "rollout__prompts_per_step": 25}
    run = start(tmp_path, begins=Sizes(200, begins * ROW), batch=batch, **settings)
    assert run.chosen().micro_batch_tokens == best * ROW
    assert len(run.device.measured) <= 8


def test_of_equally_fast_micro_batches_the_smallest_is_chosen(tmp_path: Path):
    run = start(tmp_path, batch=lambda n: n / 14)
    assert run.beginning.sizes.micro_batch_tokens > ROW
    assert run.chosen().micro_batch_tokens == ROW


def test_slots_are_chosen_for_the_rollouts_of_a_step(tmp_path: Path):
    """More slots generate more tokens per second, but a step has fewer rollouts."""
    run = start(tmp_path, segment=lambda n: 0.01 + 1e-6 * n, rollout__prompts_per_step=3)
    assert run.chosen().slots == 24


# --- memory


@pytest.mark.parametrize("when", ["most", "compiles"])
def test_neighbours_out_of_memory_are_ruled_out(tmp_path: Path, when: str):
    fast: dict[str, Any] = {"segment": lambda _: 0.01, "batch": lambda n: 0.1 + 0.001 * n}
    begins, most = Sizes(8, 2 * ROW), Sizes(16, 4 * ROW)
    run = start(tmp_path, begins=begins, **fast, **{when: most})
    assert run.chosen() == most
    entries = run.journal()
    assert [entry["event"] for entry in entries] == ["compiled", "calibrated"]
    assert entries[-1]["speeds"]["room"] == {"slots": 31, "micro_batch_tokens": 8 * ROW - 1}
    assert entries[-1]["sizes"] == most.to_json()
    assert sum("out of memory" in line for line in run.said) == 2


@pytest.mark.parametrize("when", ["most", "compiles"])
def test_planned_sizes_out_of_memory_are_reduced_even_beyond_the_share(tmp_path: Path, when: str):
    most = Sizes(20, 4 * ROW)
    late: dict[str, Any] = {"prepare_s": 10.0, "plan__calibration_share": 0.001}
    run = start(tmp_path, begins=Sizes(64, 14 * ROW), **late, **{when: most})
    assert run.chosen().at_most(most.to_json()) == run.controller.in_force
    assert {"replan", "calibrated"} <= {entry["event"] for entry in run.journal()}
    # Not tried again in this process, even if real lengths would favour larger ones.
    assert run.controller.room["slots"] <= 20


def test_nothing_that_fits_ends_the_start(tmp_path: Path):
    with pytest.raises(NothingSmaller, match=r"nothing smaller than plan\.slots = 1"):
        start(tmp_path, most=Sizes(0, 10**6)).run()


# --- time


def test_neighbours_are_measured_within_the_share_of_the_budget(tmp_path: Path):
    # The smallest sizes are the fastest, so all would be measured.
    slow: dict[str, Any] = {"segment": lambda n: n**2.0, "batch": lambda n: n**2.0}
    slow |= {"prepare_s": 20.0, "begins": Sizes(64, 14 * ROW)}
    whole = start(tmp_path / "all", **slow, plan__calibration_share=0.5)
    assert whole.chosen() == Sizes(1, ROW)
    hours: dict[str, Any] = {
        "budget__steps": "none",
        "budget__time": "2h",
        "learner__schedule": "constant",
    }
    for share, given in ((72, {}), (28.8, hours | {"plan__calibration_share": 0.004})):
        run = start(tmp_path / str(share), **slow, **given)
        assert calibration_share_s(run.config) == pytest.approx(share)
        run.run()
        started = 20.0  # before the measurements
        assert started < run.device.clock.seconds <= started + share
        assert 2 < len(run.device.measured) < len(whole.device.measured)


def test_a_share_of_zero_uses_the_planned_sizes(tmp_path: Path):
    run = start(tmp_path, plan__calibration_share=0)
    assert run.run() is None
    assert run.device.measured == []
    assert run.controller.in_force == planned_sizes(PlanCase.of(run.config))


def test_the_default_share_is_two_percent(tmp_path: Path):
    assert calibration_share_s(config(tmp_path)) == CALIBRATION_SHARE * 3600 == 72
    until = {"budget__steps": "none", "budget__until": "2030-01-01T10:00+00:00"}
    dated = config(tmp_path, learner__schedule="constant", **until)
    end = dated.budget.until_s
    assert end is not None
    assert calibration_share_s(dated, now_s=end - 7200) == 144
    assert calibration_share_s(dated, now_s=end + 1) == 0


# --- what is not measured


def test_a_resume_uses_the_chosen_sizes_without_measuring(tmp_path: Path):
    first = start(tmp_path, segment=lambda n: 0.01 * n)
    sizes = first.chosen()
    first.journal()
    again = start(tmp_path)
    assert again.beginning == CalibrationStart(sizes)
    assert again.run() is None
    assert again.device.measured == []


def test_a_gpu_requires_configured_sizes(tmp_path: Path):
    gpu = with_plan(config(tmp_path), {"platform": "gpu"})
    with pytest.raises(ValueError, match=r"set plan\.slots"):
        CalibrationStart.of(gpu, None)
    given = with_plan(gpu, {"slots": 8, "micro_batch_tokens": ROW})
    assert CalibrationStart.of(given, None) == CalibrationStart(Sizes(8, ROW))
    asked = [("plan.fixed", "false"), ("plan.platform", "gpu"), ("plan.calibration_share", "0.1")]
    with pytest.raises(ValueError, match=r"calibration_share = 0\.1: has no effect on gpu"):
        load_config(ROOT / "configs/demo.toml", asked)


# --- cached speeds


def test_speeds_round_trip_through_json():
    speeds = Speeds("d", {8: 0.5, 16: 0.7}, {64: 0.1}, {16: 0.2}, {4: 1.5}, {"slots": 32})
    assert Speeds.of_json(json.loads(json.dumps(speeds.to_json()))) == speeds


def test_the_next_run_of_the_same_shapes_starts_with_cached_speeds(tmp_path: Path):
    slow: dict[str, Any] = {"segment": lambda n: 0.01 if n <= 16 else 1.0}
    first, sizes = (run := start(tmp_path / "a", **slow)), run.chosen()
    second = start(tmp_path / "b", **slow)
    assert (second.beginning.sizes, second.chosen()) == (sizes, sizes)
    # Measured only to check that the device is equally fast.
    assert second.device.measured == [f"{sizes.micro_batch_tokens // ROW} rows"]
    entries = [one.journal()[-1] for one in (first, second)]
    assert [entry["kept"] for entry in entries] == [False, True]
    assert entries[0]["speeds"] == entries[1]["speeds"]
    # Another step size and other bounds: a different choice from the same speeds.
    other: dict[str, Any] = {"rollout__prompts_per_step": 4, "plan__micro_batch_tokens": ROW}
    third = start(tmp_path / "c", **slow, **other)
    assert third.beginning.cached is not None
    assert third.beginning.sizes.micro_batch_tokens == ROW


def test_the_next_run_measures_what_this_one_had_no_time_for(tmp_path: Path):
    device: dict[str, Any] = {"batch": lambda n: 0.2 + 0.01 * n, "prepare_s": 10.0}
    short = start(tmp_path / "a", begins=Sizes(8, ROW), plan__calibration_share=0.001, **device)
    short.chosen()
    # 1.4 times slower now: new measurements are compared with cached ones in proportion.
    slower = {**device, "batch": lambda n: 1.4 * (0.2 + 0.01 * n)}
    long = start(tmp_path / "b", plan__calibration_share=0.5, **slower)
    assert long.beginning.sizes == short.controller.in_force
    assert long.chosen().micro_batch_tokens == 14 * ROW
    twice = [what for what in long.device.measured if what in short.device.measured]
    assert twice == [f"{long.beginning.sizes.micro_batch_tokens // ROW} rows"]
    entry = long.journal()[-1]
    assert entry["kept"] is False
    assert entry["speeds"]["micro_batch_s"] == pytest.approx(
        {rows: 1.4 * (0.2 + 0.01 * int(rows)) for rows in entry["speeds"]["micro_batch_s"]}
    )
    assert start(tmp_path / "c", **slower).chosen() == long.controller.in_force


def test_cached_sizes_that_no_longer_fit_are_not_used(tmp_path: Path):
    assert start(tmp_path / "a", segment=lambda _: 0.01).chosen().slots == 64
    less = Sizes(20, 10**6)
    second = start(tmp_path / "b", segment=lambda _: 0.01, compiles=less)
    assert second.beginning.sizes.slots == 64
    found = second.chosen().slots
    assert found <= 20
    assert start(tmp_path / "c").beginning.sizes.slots <= 20


@pytest.mark.parametrize("what", ["version", "sources", "machine", "shape", "memory"])
def test_speeds_of_other_programs_or_machines_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    start(tmp_path / "a").run()
    assert start(tmp_path / "b").beginning.cached is not None
    changes: dict[str, Any] = {}
    if what == "version":
        monkeypatch.setattr(speed_cache, "versions", lambda: {"jax": "99"})
    elif what == "sources":
        monkeypatch.setattr(speed_cache, "sources", lambda _: "other")
    elif what == "machine":
        monkeypatch.setattr(speed_cache, "machine", lambda: {"processor": "other", "cores": 2})
    elif what == "shape":
        changes = {"rollout__max_new_tokens": 40}
    else:
        changes = {"plan__hbm_gib": 1.0}
    assert start(tmp_path / "b", **changes).beginning.cached is None


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"name": "1 x TPU v9"}, False),
        ({"batch": lambda rows: 1.6 * (0.05 + 0.02 * rows)}, False),
        ({"batch": lambda rows: (0.05 + 0.02 * rows) / 1.6}, False),
        # Noise.
        ({"batch": lambda rows: 1.2 * (0.05 + 0.02 * rows)}, True),
    ],
)
def test_speeds_of_another_device_are_not_used(tmp_path: Path, changes: dict[str, Any], kept: bool):
    start(tmp_path / "a").run()
    other = start(tmp_path / "b", **changes)
    assert other.beginning.cached is not None
    other.chosen()
    entry = other.journal()[-1]
    assert entry["kept"] is kept
    assert entry["speeds"]["device"] == other.device.name
    assert (len(other.device.measured) > 1) is not kept


def test_a_damaged_or_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start(tmp_path / "a").run()
    (file,) = (tmp_path / "cache/calibration").iterdir()
    file.write_text('{"speeds": {"device"', encoding="utf-8")
    assert start(tmp_path / "b").beginning.cached is None
    (tmp_path / "no folder").write_text("", encoding="utf-8")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "no folder"))
    assert start(tmp_path / "c").chosen().slots > 0
