"""Leases: devices of each process by kind and number, and the error if the cluster has too few."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from actors import placement
from actors.placement import (
    Lease,
    Reservation,
    cluster_is_gone,
    device_free_lease,
    lease,
    shortage,
    total_resources,
)
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
def test_the_cache_folder_is_passed_on(monkeypatch: pytest.MonkeyPatch, platform: str):
    monkeypatch.setenv(CACHE_VARIABLE, "/a/folder")
    assert lease(plan(platform, "split"), 1).variables[CACHE_VARIABLE] == "/a/folder"


def test_reward_processes_reserve_nothing_and_see_no_accelerator():
    assert device_free_lease() == Lease({}, {"JAX_PLATFORMS": "cpu"})


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
def test_a_plan_needs_the_sum_of_its_leases(asked: Plan, amounts: dict[str, float]):
    assert total_resources(asked) == amounts


@pytest.mark.parametrize(
    ("asked", "amounts"),
    [
        (V5E_SPLIT, {"TPU": 4}),
        (V5E_COLOCATED, {"TPU": 8}),
        (plan("cpu", "split", learner_devices=8, samplers=2), {"CPU": 2}),
    ],
)
def test_samplers_alone_need_no_devices_of_a_learner(asked: Plan, amounts: dict[str, float]):
    assert total_resources(asked, learner=False) == amounts
    assert shortage(asked, amounts, learner=False) is None


def test_a_cluster_with_the_devices_has_no_shortage():
    assert shortage(V5E_SPLIT, {"CPU": 1.0, "TPU": 8.0}) is None


@pytest.mark.parametrize(("total", "has"), [({"CPU": 96.0}, "0"), ({"TPU": 4.0}, "4")])
def test_a_machine_without_the_chips_is_refused_with_the_numbers(total: dict[str, float], has: str):
    assert shortage(V5E_COLOCATED, total) == (
        f"plan.platform = 'tpu' needs 8 TPU in the cluster, which has {has}; "
        "no other kind of device is used instead"
    )


def test_a_release_does_not_wait_for_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch):
    asked, answered = threading.Event(), threading.Event()

    def remove(_: object) -> None:
        asked.set()
        cluster_is_gone.set()
        answered.wait()

    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: None)
    monkeypatch.setattr(placement, "remove_placement_group", remove)
    try:
        Reservation("run", []).release()
        assert asked.is_set()
    finally:
        cluster_is_gone.clear()
        answered.set()
