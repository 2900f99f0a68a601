"""The placements compared are those that processes can lease and mesh."""

from __future__ import annotations

import pytest

from configs.load import load_config
from configs.plan import TPU_LEASES
from configs.schema import Config, Plan
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.hardware import TOPOLOGIES, topology_of
from pipeline.plan.search.placements import placement_name, placements
from tests.pipeline.plan.presets import PROJECT, preset

SPLIT = (("plan.placement", "split"), ("plan.learner_devices", "4"))
AHEAD = (("plan.samplers", "4"), ("rollout.ahead", "one"), ("learner.importance_cap", "3"))
COLOCATED = ["colocated, base on every device", "colocated, fsdp 8", "colocated, tp 2"]
COLOCATED += ["colocated, tp 4", "colocated, fsdp 4, tp 2"]


def named(config: Config, topology: str) -> dict[str, Plan]:
    found = placements(config, shape_of(config), TOPOLOGIES[topology])
    return {placement_name(one, TOPOLOGIES[topology]): one.plan for one in found}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), [*COLOCATED, "split, 7 + 1", "split, 4 + 4"]),
        # The configured placement is the first.
        (
            (*SPLIT, ("plan.samplers", "2")),
            ["split, 2 + 4", *COLOCATED, "split, 7 + 1", "split, 4 + 4"],
        ),
        # With rollout.ahead only split placements are compared.
        ((*SPLIT, *AHEAD), ["split, 4 + 4", "split, 7 + 1"]),
    ],
)
def test_placements_of_eight_chips(
    overrides: tuple[tuple[str, str], ...], expected: list[str]
) -> None:
    assert list(named(preset("gemma3_1b", *overrides), "v5e-8")) == expected


@pytest.mark.parametrize("topology", ["v5e-1", "v5e-4", "v5e-8"])
def test_processes_have_leases_and_sizes_per_device(topology: str) -> None:
    for plan in named(preset("gemma3_1b"), topology).values():  # 512 slots, 16,384 tokens on 8
        assert {plan.learner_devices, plan.devices_per_sampler} <= set(TPU_LEASES)
        devices = plan.learner_devices + plan.num_samplers * (plan.placement == "split")
        assert devices == TOPOLOGIES[topology].chips
        assert plan.slots == 64 * plan.devices_per_sampler
        assert plan.micro_batch_tokens == 2048 * plan.learner_devices
    halves = preset("gemma3_1b", ("plan.tp", "2"), ("plan.micro_batch_tokens", "8192"))
    one = named(halves, "v5e-1")["colocated, one device"]
    assert one.micro_batch_tokens == 2048  # rows are not halved


def test_virtual_cpu_devices_share_the_same_cores() -> None:
    config = load_config(PROJECT / "configs/demo.toml")
    topology = topology_of(config, None)
    assert placements(config, shape_of(config), topology) == [config]
    assert placement_name(config, topology) == "split, 1 x 2 + 2"
