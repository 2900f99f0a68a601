"""Chips and topologies: their limits, which a run can use, what is refused."""

from __future__ import annotations

import pytest

from configs.load import load_config
from pipeline.plan.cost_model.hardware import TOPOLOGIES, cpu, device_count, topology_of
from tests.pipeline.plan.presets import PROJECT, preset


def test_the_name_gives_the_number_of_chips() -> None:
    for name, size in {"v5e-16": (16, 2), "v5e-256": (256, 32), "h100x8": (8, 1)}.items():
        assert (TOPOLOGIES[name].chips, TOPOLOGIES[name].hosts) == size
    one, four = cpu(1, at_once=1), cpu(4, at_once=2)  # virtual devices share the machine
    assert four.chip.hbm_gib == pytest.approx(one.chip.hbm_gib / 4)
    assert four.chip.bf16_flops == one.chip.bf16_flops / 2


def test_a_configuration_determines_its_topology() -> None:
    assert topology_of(preset("gemma3_1b"), None).name == "v5e-8"
    few = (("plan.learner_devices", "1"), ("plan.micro_batch_tokens", "2048"))
    split = preset("gemma3_1b", ("plan.placement", "split"), *few, ("plan.samplers", "4"))
    assert (device_count(split), topology_of(split, None).name) == (5, "v5e-8")
    demo = topology_of(load_config(PROJECT / "configs/demo.toml"), "cpu")
    assert (demo.name, demo.chips) == ("cpu", 4)
    for given, found in (("10", 10.0), ("40", 15.75)):
        bounded = preset("gemma3_1b", ("plan.hbm_gib", given))
        assert topology_of(bounded, None).chip.hbm_gib == found


@pytest.mark.parametrize(
    ("gib", "name"),
    [("10", "l4"), ("18", "rtx-4090"), ("30", "a100-40"), ("59", "a100-80"), ("99", "h200")],
)
def test_an_unknown_gpu_is_as_fast_as_a_known_one_with_its_memory(gib: str, name: str) -> None:
    gpu = ("plan.platform", "gpu"), ("plan.learner_devices", "1")
    known = topology_of(preset("gemma3_1b", *gpu, ("plan.hbm_gib", gib)), None)
    assert known.name == name
    assert known.chip.hbm_gib == pytest.approx(float(gib), rel=0.01)


@pytest.mark.parametrize(
    ("platform", "name", "message"),
    [
        ("tpu", "v5e-7", "unknown; known topologies: .* nearest valid: v5e-8$"),
        ("tpu", "h1000", "nearest valid: h100$"),
        ("tpu", "h100", "not 'gpu'; nearest valid: v5e-8, or --plan.platform gpu"),
        ("gpu", None, "nearest valid: --topology h100x8"),
    ],
)
def test_unknown_topologies_are_refused_with_the_nearest(
    platform: str, name: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        topology_of(preset("gemma3_1b", ("plan.platform", platform)), name)
