"""The placements compared are those that processes can lease and mesh."""

from __future__ import annotations

import pytest

from configs.load import load_config
from configs.plan import TPU_LEASES
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.hardware import TOPOLOGIES, topology_of
from pipeline.plan.search.placements import placement_candidates
from tests.pipeline.plan.presets import PROJECT, preset


def names(model: str, topology: str, *overrides: tuple[str, str]) -> list[str]:
    config = preset(model, *overrides)
    return [
        one.name for one in placement_candidates(config, shape_of(config), TOPOLOGIES[topology])
    ]


def test_placements_of_eight_chips() -> None:
    assert names("gemma3_1b", "v5e-8") == [
        "colocated, base on every device",
        "colocated, fsdp 8",
        "colocated, tp 2",
        "colocated, tp 4",
        "colocated, fsdp 4, tp 2",
        "split, 7 + 1",
        "split, 4 + 4",
    ]


def test_with_rollout_ahead_only_split_placements_are_compared() -> None:
    split = (("plan.placement", "split"), ("plan.samplers", "4"), ("plan.learner_devices", "4"))
    ahead = (("rollout.ahead", "one"), ("learner.importance_cap", "3"))
    found = names("gemma3_1b", "v5e-8", *split, *ahead)
    assert found == ["split, 4 + 4, a step ahead", "split, 7 + 1, a step ahead"]


@pytest.mark.parametrize(
    ("topology", "splits"),
    [("v5e-1", []), ("v5e-4", ["split, 3 + 1"]), ("v5e-8", ["split, 7 + 1", "split, 4 + 4"])],
)
def test_no_process_gets_two_or_three_chips(topology: str, splits: list[str]) -> None:
    config = preset("gemma3_1b")
    found = placement_candidates(config, shape_of(config), TOPOLOGIES[topology])
    split = [one for one in found if one.config.plan.placement == "split"]
    assert [one.name for one in split] == splits
    for one in split:
        plan = one.config.plan
        assert {plan.learner_devices, plan.devices_per_sampler} <= set(TPU_LEASES)
        assert plan.learner_devices + plan.num_samplers == TOPOLOGIES[topology].chips


def test_the_configured_placement_comes_first_if_it_fits() -> None:
    split = (("plan.placement", "split"), ("plan.samplers", "2"), ("plan.learner_devices", "4"))
    found = names("gemma3_1b", "v5e-8", *split)
    assert found[0] == "split, 2 + 4"
    assert "colocated, base on every device" in found
    config = preset("gemma3_1b")
    on_four = placement_candidates(config, shape_of(config), TOPOLOGIES["v5e-4"])
    assert not any(one.configured for one in on_four)
    assert on_four[0].name == "colocated, base on every device"


def test_sizes_per_device_are_kept() -> None:
    config = preset("gemma3_1b")  # 512 slots and 16,384 tokens on 8
    for topology, split in (("v5e-4", "split, 3 + 1"), ("v5e-8", "split, 4 + 4")):
        found = {
            one.name: one.config.plan
            for one in placement_candidates(config, shape_of(config), TOPOLOGIES[topology])
        }
        chips = TOPOLOGIES[topology].chips
        for name in ("colocated, base on every device", "colocated, tp 2"):
            assert found[name].slots == 64 * chips
            assert found[name].micro_batch_tokens == 2048 * chips
        assert found[split].slots == 64
        assert found[split].micro_batch_tokens == 2048 * found[split].learner_devices
    halves = preset("gemma3_1b", ("plan.tp", "2"), ("plan.micro_batch_tokens", "8192"))
    one = placement_candidates(halves, shape_of(halves), TOPOLOGIES["v5e-1"])[0].config.plan
    assert one.micro_batch_tokens == 2048  # rows cannot be halved


def test_virtual_cpu_devices_share_the_same_cores() -> None:
    config = load_config(PROJECT / "configs/demo.toml")
    found = placement_candidates(config, shape_of(config), topology_of(config, None))
    assert [(one.name, one.configured) for one in found] == [("split, 1 x 2 + 2", True)]
