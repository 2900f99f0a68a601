"""Measured speeds of this host's chips replace the published ones in plans."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import load_config
from pipeline.plan.chip_limits import ChipLimits, load_limits, save_limits
from pipeline.plan.cost_model.hardware import TOPOLOGIES, chip_speeds, topology_of
from pipeline.plan.search.fitting import choose_placement
from pipeline.run.cache_folder import cache_folder
from pipeline.run.meter import Hardware
from tests.pipeline.plan.presets import FREE, PROJECT, case, preset

MEASURED = ChipLimits(700e9, 150e12, 300e12, "2026-11-25T12:00:00+00:00")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_GRPO_CACHE", str(tmp_path))


def test_speeds_are_kept_by_host_and_kind_of_chip(monkeypatch: pytest.MonkeyPatch):
    assert save_limits("TPU v5e", MEASURED)
    assert load_limits("TPU v5e") == MEASURED
    assert load_limits("TPU v6e") is None
    monkeypatch.setattr(platform, "node", lambda: "another/host")
    assert load_limits("TPU v5e") is None
    other = replace(MEASURED, bf16_flops=1e12)
    assert save_limits("TPU v5e", other)
    assert load_limits("TPU v5e") == other
    assert len(list(cache_folder("chip_limits").iterdir())) == 2


def test_a_damaged_file_is_as_none():
    save_limits("TPU v5e", MEASURED)
    (file,) = cache_folder("chip_limits").iterdir()
    file.write_text("{}", encoding="utf-8")
    assert load_limits("TPU v5e") is None


def test_plans_use_measured_speeds():
    config = preset("gemma3_1b", *FREE)
    before = choose_placement(case(config)).chosen.step.total
    save_limits("TPU v5e", MEASURED)
    chip = topology_of(config, None).chip
    assert (chip.bytes_per_s, chip.bf16_flops, chip.int8_flops) == (700e9, 150e12, 300e12)
    assert (chip.measured, chip.hbm_gib) == (MEASURED.measured, 15.75)
    assert chip.published == TOPOLOGIES["v5e-8"].chip
    after = choose_placement(case(config)).chosen.step.total
    assert 1.05 * before.low < after.low < 1.4 * before.low
    assert 1.05 * before.expected < after.expected < 1.4 * before.expected


def test_a_run_journals_the_speeds():
    config = preset("gemma3_1b")
    published = {"bytes_per_s": 819e9, "bf16_flops": 197e12, "int8_flops": 393e12}
    assert chip_speeds(config) == published | {"measured": None}
    save_limits("TPU v5e", MEASURED)
    assert chip_speeds(config) == vars(MEASURED)
    assert chip_speeds(load_config(PROJECT / "configs/demo.toml")) is None


def test_shares_of_the_peak_refer_to_the_published_one():
    save_limits("TPU v5e", MEASURED)
    assert Hardware.of(preset("gemma3_1b")).flops == 197e12
