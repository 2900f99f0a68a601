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
    (file,) = cache_folder("chip_limits").iterdir()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(platform, "node", lambda: "another/host")
        assert load_limits("TPU v5e") is None
        other = replace(MEASURED, bf16_flops=1e12)
        assert save_limits("TPU v5e", other)
        assert load_limits("TPU v5e") == other
    assert load_limits("TPU v5e") == MEASURED
    file.write_text("{}", encoding="utf-8")  # damaged
    assert load_limits("TPU v5e") is None


def test_plans_use_measured_speeds_and_shares_of_the_peak_the_published_ones():
    config = preset("gemma3_1b", *FREE)
    published = {"bytes_per_s": 819e9, "bf16_flops": 197e12, "int8_flops": 393e12}
    assert chip_speeds(config) == published | {"measured": None}
    assert chip_speeds(load_config(PROJECT / "configs/demo.toml")) is None
    before, peak = choose_placement(case(config)).chosen.step.total, Hardware.of(config)
    save_limits("TPU v5e", MEASURED)
    assert chip_speeds(config) == vars(MEASURED)
    chip = topology_of(config, None).chip
    assert chip.published == TOPOLOGIES["v5e-8"].chip
    assert chip == replace(chip.published, **vars(MEASURED))
    after = choose_placement(case(config)).chosen.step.total
    assert 1.05 * before.low < after.low < 1.4 * before.low
    assert 1.05 * before.expected < after.expected < 1.4 * before.expected
    assert Hardware.of(config).flops == peak.flops
