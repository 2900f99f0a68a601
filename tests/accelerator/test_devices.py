"""The devices themselves: number and memory, collectives, a checkpoint, speed."""

from __future__ import annotations

from dataclasses import asdict

import jax
import numpy as np
import pytest

from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.topology import GIB, HBM_GIB
from tests.accelerator import devices
from tests.accelerator.conftest import Report
from tests.accelerator.small_model import SmallModel

pytestmark = pytest.mark.accelerator

V5E = TOPOLOGIES["v5e-8"].chip
"""Whose published limits are compared: runs support no other TPU."""
_GIB_STEP = 0.01
_GROUP = 4
"""Chips of half a host."""


def test_memory(chips: list[jax.Device], report: Report):
    text = f"{len(chips)} x {chips[0].device_kind}"
    stats = [one.memory_stats() for one in chips]
    limits = [found["bytes_limit"] / GIB for found in stats if found and "bytes_limit" in found]
    if limits:
        text += f" with {min(limits):.2f} GiB"
    if limits and chips[0].platform == "tpu" and min(limits) < HBM_GIB - _GIB_STEP:
        text += f"; plans assume {HBM_GIB:.2f}: set plan.hbm_gib = {min(limits):.2f}"
    report(text, {"devices": len(chips), "gib": min(limits, default=None)})


@pytest.mark.parametrize("group", ["all", "half a host"])
def test_collectives_of_whole_numbers_are_exact(chips: list[jax.Device], group: str):
    size = len(chips) if group == "all" else _GROUP
    if group != "all" and len(chips) != 2 * _GROUP:
        pytest.skip(f"there are {len(chips)} devices, not {2 * _GROUP}")
    for name, (found, wanted) in devices.exchanged(chips, size).items():
        np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_a_checkpoint_is_restored_bit_for_bit(chips: list[jax.Device]):
    written, read = devices.saved_and_restored(SmallModel.on(chips))
    jax.tree.map(np.testing.assert_array_equal, written, read)


def test_speed(chips: list[jax.Device], report: Report):
    if chips[0].platform == "cpu":
        pytest.skip("virtual CPU devices share the speed of the CPU")
    speeds = asdict(devices.measured(chips))
    text = (
        f"memory {speeds['bytes_per_s'] / 1e9:,.0f} GB/s; products in bfloat16 "
        f"{speeds['bf16_flops'] / 1e12:,.0f} TFLOP/s, in 8 bits "
        f"{speeds['int8_flops'] / 1e12:,.0f} TOP/s"
    )
    if chips[0].platform == "tpu":
        published = ("bytes_per_s", "bf16_flops")
        least = min(speeds[name] / getattr(V5E, name) for name in published)
        text += f"; of the published speeds {least:.0%} or more"
    report(text, speeds)
