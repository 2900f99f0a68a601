"""The devices themselves: number and memory, collectives, a checkpoint, speed."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

import jax
import numpy as np
import pytest

from pipeline.plan.chip_limits import ChipLimits, save_limits
from pipeline.plan.cost_model.hardware import SPEEDS, TOPOLOGIES
from pipeline.plan.topology import GIB, HBM_GIB
from tests.accelerator import devices
from tests.accelerator.conftest import Report

pytestmark = pytest.mark.accelerator

V5E = TOPOLOGIES["v5e-8"].chip
"""Whose published limits are compared: runs support no other TPU."""
_GIB_STEP = 0.01
_GROUP = 4
"""Chips of half a host."""
_LEAST, _MOST = 0.5, 1.1
"""Measured speeds as shares of the published ones that are kept for plans. A lower one was measured
beside other work or on another chip, a higher one cannot be."""


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


def test_speed(chips: list[jax.Device], report: Report):
    """Plausible speeds of a v5e are kept in the cache folder, for later plans on this host."""
    if chips[0].platform == "cpu":
        pytest.skip("virtual CPU devices share the speed of the CPU")
    speeds = asdict(devices.measured(chips))
    text = (
        f"memory {speeds['bytes_per_s'] / 1e9:,.0f} GB/s; products in bfloat16 "
        f"{speeds['bf16_flops'] / 1e12:,.0f} TFLOP/s, in 8 bits "
        f"{speeds['int8_flops'] / 1e12:,.0f} TOP/s"
    )
    if chips[0].platform == "tpu":
        shares = {name: speeds[name] / getattr(V5E, name) for name in SPEEDS}
        text += f"; of the published speeds {min(shares.values()):.0%} or more"
        if all(_LEAST <= share <= _MOST for share in shares.values()):
            now = datetime.now(UTC).isoformat(timespec="seconds")
            kept = save_limits(V5E.name, ChipLimits(**speeds, measured=now))
            text += ", kept for later plans on this host" if kept else ", not kept: no cache folder"
        else:
            text += ", not plausible, so plans keep those: repeat it while nothing else runs here"
    report(text, speeds)
