"""Choice of the cluster, and messages while waiting for devices; with a fake Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from actors.placement import Node, Reservation
from configs.schema import Plan
from launch import cluster
from launch.exits import EXIT_FAILED, Failure
from pipeline.protocols import WorkerDied

CPU = Plan(platform="cpu", placement="split", samplers=2, slots=2, micro_batch_tokens=2)
TPU = Plan(platform="tpu", placement="colocated", learner_devices=8, slots=8, micro_batch_tokens=8)


OWN = SimpleNamespace(id=SimpleNamespace(hex=lambda: "own"))
"""A placement group."""


class FakeRay:
    """Records how Ray was started; has the given resources and groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[dict[str, Any]] = []
        self.stopped = 0
        self.total: dict[str, float] = {"CPU": 4.0}
        self.free: dict[str, float] = {}
        self.groups: list[dict[str, Any]] = []
        self.error: Exception | None = None
        for name, fake in {
            "init": self.init,
            "shutdown": self.shutdown,
            "is_initialized": lambda: False,
            "cluster_resources": lambda: self.total,
            "available_resources": lambda: self.free,
        }.items():
            monkeypatch.setattr(ray, name, fake)
        monkeypatch.setattr(
            cluster, "alive_nodes", lambda: [Node("a", "host", "10.0.0.1", self.total)]
        )
        monkeypatch.setattr(cluster, "placement_group_table", self.placement_group_table)

    def init(self, **settings: Any) -> None:
        self.started.append(settings)
        if self.error:
            raise self.error

    def shutdown(self) -> None:
        self.stopped += 1

    def placement_group_table(self) -> dict[str, dict[str, Any]]:
        return {group["placement_group_id"]: group for group in self.groups}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return FakeRay(monkeypatch)


def test_a_dashboard_is_not_a_cluster(fake: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with (
        pytest.raises(ValueError, match=r"takes jobs: use launch/submit\.sh"),
        cluster.cluster(CPU, tpu_chips=None),
    ):
        pass
    assert fake.started == []


def test_a_job_joins_the_cluster_it_was_submitted_to(fake: FakeRay):
    with cluster.cluster(CPU, tpu_chips=None):
        assert fake.started == [{"log_to_driver": False}]
        assert fake.stopped == 0
    assert fake.stopped == 1


def test_a_cluster_without_the_devices_is_refused_and_left(fake: FakeRay):
    fake.total = {"CPU": 96.0}
    with (
        pytest.raises(ValueError, match="needs 8 TPU in the cluster, which has 0"),
        cluster.cluster(TPU, tpu_chips=None),
    ):
        raise AssertionError
    assert fake.stopped == 1


def test_an_address_without_a_cluster_gives_one_sentence(fake: FakeRay):
    fake.error = ConnectionError("long story")
    with (
        pytest.raises(ValueError, match=r"^RAY_ADDRESS = 10\.0\.0\.1:6379: no Ray cluster answers"),
        cluster.cluster(CPU, tpu_chips=None),
    ):
        raise AssertionError


def test_a_run_that_is_started_again_without_its_cluster_has_a_status_of_its_own(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GEMMA_GRPO_RESTARTED", "a process of the run died")
    fake.error = ConnectionError("long story")
    gone = r"^the cluster of this run at RAY_ADDRESS = 10\.0\.0\.1:6379 is gone; the same command"
    with pytest.raises(Failure, match=gone) as ends, cluster.cluster(CPU, tpu_chips=None):
        raise AssertionError
    assert ends.value.status == 75


def test_a_death_that_is_not_made_up_for_is_a_sentence(fake: FakeRay):
    with (
        pytest.raises(Failure, match=r"^sampler 0: it hangs; give the same command again$") as ends,
        cluster.cluster(CPU, tpu_chips=None),
    ):
        raise WorkerDied("sampler 0", "it hangs")
    assert ends.value.status == EXIT_FAILED
    assert fake.stopped == 1


@pytest.fixture
def started(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The settings of private clusters, which have 8 chips."""
    monkeypatch.delenv("RAY_ADDRESS")
    fake.total["TPU"] = 8.0
    found: list[dict[str, Any]] = []

    @contextmanager
    def private(**settings: Any) -> Iterator[None]:
        found.append(settings)
        yield

    monkeypatch.setattr(cluster, "private_cluster", private)
    yield found
    assert fake.started == []


@pytest.mark.parametrize(
    ("plan", "learner", "cores", "cpus"),
    [
        (CPU, True, 2, 3),  # one for each process with devices, whatever the machine has
        (CPU, True, 4, 4),
        (CPU, True, 224, 5),
        (CPU, False, 224, 4),
        (TPU, True, 1, 1),
        (TPU, True, 224, 3),  # the process with the chips, the rewards' host, the exporter
    ],
)
def test_a_private_cluster_has_the_cpus_that_its_processes_need(
    started: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    learner: bool,
    cores: int,
    cpus: int,
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    with cluster.cluster(plan, tpu_chips=None, learner=learner):
        (settings,) = started
    assert settings["num_cpus"] == cpus
    assert settings["resources"] is None


def group(name: str, state: str, *bundles: dict[str, float], ident: str = "") -> dict[str, Any]:
    return {
        "placement_group_id": ident or f"id of {name}",
        "name": name,
        "state": state,
        "bundles": dict(enumerate(bundles)),
    }


def test_the_line_names_the_runs_that_hold_devices(fake: FakeRay):
    fake.total, fake.free = {"TPU": 8.0}, {"TPU": 2.0}
    fake.groups = [
        group("run gsm8k", "CREATED", {"TPU": 4.0}, {"TPU": 1.0}),
        group("run own", "PENDING", {"TPU": 8.0}, ident="own"),
        group("run later", "PENDING", {"TPU": 8.0}),
        group("run ended", "REMOVED", {"TPU": 8.0}),
        group("run cpu", "CREATED", {"CPU": 1.0}),
        group("", "CREATED", {"TPU": 0.5}, ident="9f"),
    ]
    devices = cast("Reservation", SimpleNamespace(group=OWN))
    assert cluster._waiting_line(devices, TPU, learner=True) == (
        "waiting for devices: 8 TPU together (2 of 8 free); held by: run gsm8k (5 TPU); "
        "placement group 9f (0.5 TPU)"
    )
