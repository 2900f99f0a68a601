"""Choice of the cluster and its messages, with a fake Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.placement import Node
from configs.schema import Config
from launch import cluster
from launch.exits import EXIT_CLUSTER_LOST, Failure
from tests.samples import make_config

CPU = make_config(Path(), plan={"platform": "cpu", "samplers": 2})
CHIPS = {"learner_devices": 8, "slots": 8, "micro_batch_tokens": 8 * 88}
TPU = make_config(Path(), plan={"platform": "tpu", "placement": "colocated", **CHIPS})


class FakeRay:
    """Records how Ray was started; has four CPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[dict[str, Any]] = []
        self.stopped = 0
        self.error: Exception | None = None
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", self.shutdown)
        node = Node("a", "host", "10.0.0.1", {"CPU": 4.0})
        monkeypatch.setattr(cluster, "alive_nodes", lambda: [node])

    def init(self, **settings: Any) -> None:
        self.started.append(settings)
        if self.error:
            raise self.error

    def shutdown(self) -> None:
        self.stopped += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return FakeRay(monkeypatch)


def test_a_cluster_that_does_not_serve_is_a_sentence(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
):
    def refused(config: Config, error: type[Exception], told: str) -> Exception:
        with pytest.raises(error, match=told) as found, cluster.cluster(config):
            raise AssertionError
        return found.value

    refused(TPU, ValueError, "needs 8 TPU, those of a process on one node, .* has 0; add a node")
    assert (fake.started, fake.stopped) == ([{"log_to_driver": False}], 1)
    fake.error, address = ConnectionError("long story"), r"RAY_ADDRESS = 10\.0\.0\.1:6379"
    refused(CPU, ValueError, f"^{address}: no Ray cluster answers")
    # A run that is started again has a status of its own.
    monkeypatch.setenv("GEMMA_GRPO_RESTARTED", "a process of the run died")
    gone = f"^the cluster of this run at {address} is gone; the same command"
    found = refused(CPU, Failure, gone)
    assert isinstance(found, Failure)
    assert found.status == EXIT_CLUSTER_LOST
