"""Which process asks for which devices, by kind and number, and what is said if there are none."""

from __future__ import annotations

from typing import Any

import pytest

from actors.placement import Lease, lease, light, needed, shortage
from configs.schema import Plan
from pipeline.compute.devices import malloc_environment
from pipeline.contracts.cache_folder import CACHE_VARIABLE


def plan(platform: str, placement: str, **changes: Any) -> Plan:
    sizes = {"slots": 16, "micro_batch_tokens": 16}
    return Plan.model_validate({"platform": platform, "placement": placement, **sizes, **changes})


@pytest.fixture(autouse=True)
def _without_a_cache_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)


V5E_SPLIT = plan("tpu", "split", learner_devices=4, samplers=4)
V5E_COLOCATED = plan("tpu", "colocated", learner_devices=8)


def test_chips_are_leased_one_by_one():
    assert lease(V5E_SPLIT, 4) == Lease({"TPU": 4}, {"JAX_PLATFORMS": "tpu"})
    assert lease(plan("gpu", "split"), 1) == Lease({"GPU": 1}, {"JAX_PLATFORMS": "cuda"})


def test_virtual_devices_share_one_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert lease(plan("cpu", "colocated", learner_devices=8), 8) == Lease(
        {"CPU": 1},
        {
            "JAX_PLATFORMS": "cpu",
            **malloc_environment(),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
    )


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_cache_of_ones_own_is_passed_on(monkeypatch: pytest.MonkeyPatch, platform: str):
    monkeypatch.setenv(CACHE_VARIABLE, "/a/folder")
    assert lease(plan(platform, "split"), 1).variables[CACHE_VARIABLE] == "/a/folder"


def test_reward_processes_hold_nothing_and_see_no_accelerator():
    assert light() == Lease({}, {"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(
    ("asked", "amounts"),
    [
        (V5E_SPLIT, {"TPU": 8}),
        (V5E_COLOCATED, {"TPU": 8}),
        (plan("tpu", "split", learner_devices=4, samplers=1, sampler_devices=4), {"TPU": 8}),
        (plan("cpu", "split", learner_devices=8, samplers=2), {"CPU": 3}),
        (plan("cpu", "colocated", learner_devices=8), {"CPU": 1}),
        (plan("gpu", "split"), {"GPU": 2}),
    ],
)
def test_a_plan_needs_what_its_processes_lease_together(asked: Plan, amounts: dict[str, float]):
    assert needed(asked) == amounts


@pytest.mark.parametrize(
    ("asked", "amounts"),
    [
        (V5E_SPLIT, {"TPU": 4}),
        (V5E_COLOCATED, {"TPU": 8}),
        (plan("cpu", "split", learner_devices=8, samplers=2), {"CPU": 2}),
    ],
)
def test_samplers_alone_need_no_learners_devices(asked: Plan, amounts: dict[str, float]):
    assert needed(asked, learner=False) == amounts
    assert shortage(asked, amounts, learner=False) is None


def test_enough_is_enough():
    assert shortage(V5E_SPLIT, {"CPU": 1.0, "TPU": 8.0}) is None


@pytest.mark.parametrize(("total", "has"), [({"CPU": 96.0}, "0"), ({"TPU": 4.0}, "4")])
def test_a_machine_without_the_chips_is_told_and_nothing_is_taken_instead(
    total: dict[str, float], has: str
):
    assert shortage(V5E_COLOCATED, total) == (
        f"plan.platform = 'tpu' needs 8 TPU in the cluster, which has {has}; "
        "nothing else is taken instead"
    )
