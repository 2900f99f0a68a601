"""Chips and topologies: their limits, which a run can use, what is refused."""

from __future__ import annotations

import re

import pytest

from configs.load import load_config
from pipeline.plan.cost_model.hardware import (
    TOPOLOGIES,
    cpu,
    device_count,
    refuse_plan_only,
    topology_of,
)
from tests.pipeline.plan.presets import PROJECT, preset


@pytest.mark.parametrize(
    ("name", "chips", "hosts"),
    [
        ("v5e-16", 16, 2),
        ("v5e-256", 256, 32),
        ("v5p-8", 4, 1),
        ("v6e-64", 64, 16),
        ("gpu-80x8", 8, 1),
    ],
)
def test_the_name_gives_the_number_of_chips(name: str, chips: int, hosts: int) -> None:
    assert (TOPOLOGIES[name].chips, TOPOLOGIES[name].hosts) == (chips, hosts)


def test_plan_only_topologies_give_the_reason() -> None:
    one = preset("gemma3_1b").plan
    trained = {name for name, found in TOPOLOGIES.items() if found.why_not_trained(one) is None}
    assert all(name.startswith(("v5e-", "gpu-")) for name in trained)
    assert {"v5e-8", "v5e-16", "v5e-256", "gpu-80x8"} <= trained
    assert "published limits" in str(TOPOLOGIES["v6e-8"].why_not_trained(one))


def test_a_configuration_determines_its_topology() -> None:
    assert topology_of(preset("gemma3_1b"), None).name == "v5e-8"
    split = preset(
        "gemma3_1b",
        ("plan.placement", "split"),
        ("plan.samplers", "4"),
        ("plan.learner_devices", "1"),
        ("plan.micro_batch_tokens", "2048"),
    )
    assert device_count(split) == 5
    assert topology_of(split, None).name == "v5e-8"
    assert topology_of(split, "v6e-8").chip.hbm_gib == 31.25


def test_a_process_on_more_than_a_host_is_refused() -> None:
    refuse_plan_only(preset("gemma3_1b"))
    refuse_plan_only(load_config(PROJECT / "configs/demo.toml"))
    split = [("plan.placement", "split"), ("plan.samplers", "2")]
    refuse_plan_only(preset("gemma3_1b", *split, ("plan.sampler_devices", "4")))
    with pytest.raises(ValueError, match=r"plan\.sampler_devices = 16: .* 2 hosts of v5e-64"):
        refuse_plan_only(preset("gemma3_1b", *split, ("plan.sampler_devices", "16")))
    many = preset("gemma3_1b", ("plan.learner_devices", "16"), ("plan.micro_batch_tokens", "32768"))
    message = (
        r"plan\.learner_devices = 16: a process of 16 chips spans 2 hosts .* comes later; .* 8$"
    )
    with pytest.raises(ValueError, match=message):
        refuse_plan_only(many)


@pytest.mark.parametrize(("given", "found"), [("10", 10.0), ("40", 15.75)])
def test_hbm_gib_bounds_the_memory(given: str, found: float) -> None:
    bounded = preset("gemma3_1b", ("plan.hbm_gib", given))
    assert topology_of(bounded, None).chip.hbm_gib == found


def test_virtual_devices_share_the_machine() -> None:
    one, four = cpu(1, at_once=1), cpu(4, at_once=2)
    assert four.chip.hbm_gib == pytest.approx(one.chip.hbm_gib / 4)
    assert four.chip.bf16_flops == one.chip.bf16_flops / 2
    demo = topology_of(load_config(PROJECT / "configs/demo.toml"), "cpu")
    assert (demo.name, demo.chips) == ("cpu", 4)


@pytest.mark.parametrize(
    ("settings", "name", "message"),
    [
        ([], "v5e-7", "unknown; known topologies: .* nearest valid: v5e-8$"),
        ([], "v5e-3", "nearest valid: v5e-4$"),
        ([], "v5e-1000", "nearest valid: v5e-256$"),
        ([], "gpu-100", "nearest valid: gpu-80$"),
        ([], "cpu", "plan.platform is 'tpu', not 'cpu'; nearest valid: v5e-8"),
        ([], "gpu-80", "not 'gpu'; nearest valid: v5e-8, or --plan.platform gpu"),
        ([("plan.platform", "gpu")], None, "nearest valid: --topology gpu-80x8"),
    ],
)
def test_unknown_topologies_are_refused_with_the_nearest(
    settings: list[tuple[str, str]], name: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as found:
        topology_of(preset("gemma3_1b", *settings), name)
    assert re.search("nearest valid", str(found.value))
