"""Leases: devices of each process by kind and number, and the error if the cluster has too few."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from actors.groups import ModelActors
from actors.handles import ModelHandle
from actors.placement import (
    NO_DEVICES,
    Lease,
    Node,
    Reservation,
    assign,
    home_node,
    lease,
    shortage,
    total_resources,
)
from configs.schema import Plan
from pipeline.compute.devices import malloc_environment
from pipeline.run.cache_folder import CACHE_VARIABLE


def plan(platform: str, placement: str, **changes: Any) -> Plan:
    sizes = {"slots": 16, "micro_batch_tokens": 16}
    return Plan.model_validate({"platform": platform, "placement": placement, **sizes, **changes})


@pytest.fixture(autouse=True)
def _without_a_cache_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)


def nodes(*resources: dict[str, float]) -> list[Node]:
    """Nodes a, b, ... with these resources; a is the node of the command."""
    return [
        Node(ident, f"host-{ident}", f"10.0.0.{number}", amounts)
        for number, (ident, amounts) in enumerate(zip("abc", resources, strict=False), 1)
    ]


V5E_SPLIT = plan("tpu", "split", learner_devices=4, samplers=4)
V5E_COLOCATED = plan("tpu", "colocated", learner_devices=8)


TWO_HOSTS = plan("tpu", "split", learner_devices=8, samplers=2, sampler_devices=4)
CPU_SPLIT = plan("cpu", "split", learner_devices=8, samplers=2)


def test_a_lease_has_the_devices_and_the_environment_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert lease(V5E_SPLIT, 4) == Lease({"TPU": 4}, {"JAX_PLATFORMS": "tpu"})
    assert lease(plan("gpu", "split"), 1) == Lease({"GPU": 1}, {"JAX_PLATFORMS": "cuda"})
    # Virtual devices share one CPU.
    virtual = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", **malloc_environment()}
    assert lease(CPU_SPLIT, 8) == Lease({"CPU": 1}, {"JAX_PLATFORMS": "cpu", **virtual})
    # Reward processes reserve nothing and see no accelerator.
    assert Lease({}, {"JAX_PLATFORMS": "cpu"}) == NO_DEVICES
    monkeypatch.setenv(CACHE_VARIABLE, "/a/folder")
    for asked in (V5E_SPLIT, CPU_SPLIT):
        assert lease(asked, 1).variables[CACHE_VARIABLE] == "/a/folder"


@pytest.mark.parametrize(
    ("asked", "whole", "samplers"),
    [
        (V5E_COLOCATED, {"TPU": 8}, {"TPU": 8}),
        (TWO_HOSTS, {"TPU": 16}, {"TPU": 8}),
        (CPU_SPLIT, {"CPU": 3}, {"CPU": 2}),
    ],
)
def test_a_plan_needs_the_sum_of_its_leases(
    asked: Plan, whole: dict[str, float], samplers: dict[str, float]
):
    assert total_resources(asked) == whole
    assert total_resources(asked, learner=False) == samplers
    assert shortage(asked, nodes(samplers), learner=False) is None


@pytest.mark.parametrize(
    ("amounts", "rooms", "places"),
    [
        ([8, 4, 4], {"a": 8, "b": 8}, "abb"),  # a learner with a host, samplers share the other
        ([4, 4], {"a": 8}, "aa"),
        ([1, 1, 1, 1], {"a": 4, "b": 4, "c": 4}, "abcb"),
        ([4, 4, 4, 4], {"a": 8, "b": 8}, "abba"),  # the others first, the rest beside the learner
        ([4, 8], {"a": 8, "b": 8}, "ab"),
        ([8, 8], {"a": 8, "b": 4, "c": 4}, None),  # enough in all, but not for a process
        ([8], {"a": 4, "b": 8}, None),  # the run folder is on a
    ],
)
def test_the_learner_is_on_the_first_node_and_samplers_on_the_others(
    amounts: list[float], rooms: dict[str, float], places: str | None
):
    assert assign(amounts, rooms, learner=True) == (places and list(places))
    # Without a learner samplers are where the adapters are.
    assert assign([4, 4, 4], {"a": 8, "b": 8}, learner=False) == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("asked", "resources", "home", "told"),
    [
        (V5E_SPLIT, [{"CPU": 1.0, "TPU": 8.0}], "a", ""),
        (TWO_HOSTS, [{"TPU": 8.0}, {"TPU": 4.0}, {"TPU": 4.0}], "a", ""),
        (V5E_COLOCATED, [{"CPU": 2.0}, {"TPU": 4.0}, {"TPU": 8.0}], "c", "has 0, .*; start it on"),
        (
            TWO_HOSTS,
            [{"TPU": 4.0}, {"TPU": 8.0}, {"TPU": 4.0}],
            "b",
            "needs 8 . 4 . 4 TPU, .*has 4; start it on node 10.0.0.2 .* with launch/submit.sh, or",
        ),
        (V5E_COLOCATED, [{"CPU": 96.0}], None, "needs 8 TPU, .*; node 10.0.0.1 .* has 0; add a"),
        (TWO_HOSTS, [{"TPU": 8.0}, {"TPU": 2.0}, {"TPU": 6.0}], None, "has 2, node .* or reduce"),
    ],
)
def test_a_run_begins_on_a_node_that_has_the_devices(
    asked: Plan, resources: list[dict[str, float]], home: str | None, told: str
):
    found = nodes(*resources)
    assert re.search(told, shortage(asked, found) or "")
    if home is not None:
        assert home_node(asked, found).ident == home
        assert (shortage(asked, found) is None) == (home == "a")
    else:
        with pytest.raises(ValueError, match=told):
            home_node(asked, found)


# --- the same model on all nodes


def fake_actor(**answers: Any) -> Any:
    """A Ray actor: what each of its methods returns, or raises."""

    def method(answer: Any) -> Any:
        async def remote(*_: Any, **__: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(remote=remote)

    return SimpleNamespace(**{name: method(answer) for name, answer in answers.items()})


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("method", "traceback", cause)


def test_nodes_must_have_the_same_model():
    def start(*found: Any) -> None:
        """Starts a process on each node, which finds or does not find the model."""
        workers = [
            ModelHandle(fake_actor(find_model=one, node=f"node {number}"), f"sampler {number}")
            for number, one in enumerate(found)
        ]
        asyncio.run(ModelActors(cast("Reservation", None), workers).started())

    start("same", "same")
    with pytest.raises(FileNotFoundError, match=r"^no folder /m; this is on node 1, where sampler"):
        start("same", task_error(FileNotFoundError("no folder /m")))
    with pytest.raises(ValueError, match="the weights on node 1 differ from those on node 0; put"):
        start("one", "two")
