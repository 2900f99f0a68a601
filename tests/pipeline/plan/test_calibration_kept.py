"""Cached speeds: what the next run still measures, and when it measures everything again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.contracts.cache_folder import CACHE_VARIABLE
from pipeline.plan import speed_cache
from tests.pipeline.plan.calibration_runs import ROW, Device, Small, cache, chosen, start

__all__ = ["cache"]


def test_the_next_run_of_the_same_shapes_starts_with_cached_speeds(tmp_path: Path):
    slow = lambda config: Device(config, segment=lambda n: 0.01 if n <= 16 else 1.0)  # noqa: E731
    first = start(tmp_path / "a", slow)
    sizes = chosen(first)
    second = start(tmp_path / "b", slow)
    assert second.beginning.sizes == sizes
    assert chosen(second) == sizes
    # Measured only to check that the device is equally fast.
    assert second.device.measured == [f"{sizes.micro_batch_tokens // ROW} rows"]
    entries = [one.journal()[-1] for one in (first, second)]
    assert [entry["kept"] for entry in entries] == [False, True]
    assert entries[0]["speeds"] == entries[1]["speeds"]
    assert entries[0]["estimated"].keys() == {"sampling_s", "learning_s"}
    for what in ("sampling_s", "learning_s"):
        assert entries[0]["estimated"][what].keys() == entries[0][what].keys()
    # Another step size: a different choice from the same speeds.
    third = start(tmp_path / "c", slow, rollout__prompts_per_step=4, plan__micro_batch_tokens=ROW)
    assert third.beginning.cached is not None


def test_the_next_run_measures_the_sizes_that_are_not_cached(tmp_path: Path):
    def device(config: Config) -> Device:
        return Device(config, batch=lambda n: 0.2 + 0.01 * n if n <= 4 else 0.2 * n, prepare_s=10.0)

    short = start(tmp_path / "a", device, plan__calibration_share=0.001)
    assert chosen(short).micro_batch_tokens == short.beginning.sizes.micro_batch_tokens
    long = start(tmp_path / "b", device, plan__calibration_share=0.5)
    assert (long.beginning.sizes, long.beginning.more) == (short.controller.in_force, True)
    found = chosen(long)
    assert found.micro_batch_tokens == 4 * ROW
    # Only the size that identifies the device is measured again.
    twice = [what for what in long.device.measured if what in short.device.measured]
    assert twice == [f"{long.beginning.sizes.micro_batch_tokens // ROW} rows"]
    assert long.journal()[-1]["kept"] is False
    again = start(tmp_path / "c", device, plan__calibration_share=0.5)
    assert (again.beginning.sizes, again.beginning.more, chosen(again)) == (found, False, found)
    (tmp_path / "cache").rename(tmp_path / "other")
    assert chosen(start(tmp_path / "d", device, plan__calibration_share=0.5)) == found


def test_a_share_too_short_for_another_size_measures_no_new_size(tmp_path: Path):
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


def test_cached_speeds_are_scaled_to_new_measurements(tmp_path: Path):
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


def test_a_cached_size_that_no_longer_fits_is_not_used(tmp_path: Path):
    first = start(tmp_path / "a", lambda config: Device(config, segment=lambda _: 0.01))
    assert chosen(first).slots == 64
    second = start(tmp_path / "b", lambda config: Small(config, segment=lambda _: 0.01))
    assert second.beginning.sizes.slots == 64
    assert chosen(second).slots == 16
    assert second.journal()[-1]["kept"] is False  # 16 slots had not been measured
    assert start(tmp_path / "c").beginning.sizes.slots == 16


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
    assert other.beginning.cached is not None
    chosen(other)
    entry = other.journal()[-1]
    assert entry["kept"] is False
    assert entry["speeds"]["device"] == other.device.name
    assert len(other.device.measured) > 2
    assert entry["speeds"]["full_slots"] == []
    # Small differences are noise.
    near = Device(other.config, batch=lambda rows: 1.2 * other.device.batch(rows))
    near.name, near.most = other.device.name, other.device.most
    third = start(tmp_path / "c", lambda _: near)
    chosen(third)
    assert third.journal()[-1]["kept"] is True


def test_a_damaged_or_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start(tmp_path / "a").run()
    (file,) = (tmp_path / "cache/calibration").iterdir()
    file.write_text('{"speeds": {"device"', encoding="utf-8")
    assert start(tmp_path / "b").beginning.cached is None
    (tmp_path / "no folder").write_text("", encoding="utf-8")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "no folder"))
    assert chosen(start(tmp_path / "c")).slots > 0
