"""Which cluster a run works on, and what it says while it waits; Ray itself is faked here."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from configs.schema import Plan
from launch import cluster

CPU = Plan(platform="cpu", placement="split", samplers=2, rollout_rows=2, micro_batch_tokens=2)
TPU = Plan(
    platform="tpu", placement="colocated", learner_devices=8, rollout_rows=8, micro_batch_tokens=8
)


class FakeRay:
    """Keeps how Ray was started; has the resources that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[dict[str, Any]] = []
        self.stopped = 0
        self.total: dict[str, float] = {"CPU": 4.0}
        self.free: dict[str, float] = {}
        self.error: Exception | None = None
        for name, fake in {
            "init": self.init,
            "shutdown": self.shutdown,
            "cluster_resources": lambda: self.total,
            "available_resources": lambda: self.free,
            "get_runtime_context": lambda: SimpleNamespace(get_job_id=lambda: "own"),
        }.items():
            monkeypatch.setattr(ray, name, fake)

    def init(self, **settings: Any) -> None:
        self.started.append(settings)
        if self.error:
            raise self.error

    def shutdown(self) -> None:
        self.stopped += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cluster, "_LONGEST_PARENT", len(str(tmp_path)))
    return FakeRay(monkeypatch)


def test_a_dashboard_is_no_cluster(fake: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with (
        pytest.raises(ValueError, match=r"takes jobs: use launch/submit\.sh"),
        cluster.cluster(CPU),
    ):
        pass
    assert fake.started == []


def test_a_cluster_of_ones_own_is_private_and_goes_away(fake: FakeRay, tmp_path: Path):
    with cluster.cluster(CPU):
        (settings,) = fake.started
        assert settings["address"] == "local"
        assert settings["num_cpus"] >= 3
        assert Path(settings["_temp_dir"]).parent == tmp_path
        assert Path(settings["_temp_dir"]).is_dir()
        assert fake.stopped == 0
    assert fake.stopped == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_too_long_for_sockets_is_not_used(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    too_long = tmp_path / "1"
    too_long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    with cluster.cluster(CPU):
        (settings,) = fake.started
        assert Path(settings["_temp_dir"]).parent == Path("/tmp")
    assert not Path(settings["_temp_dir"]).exists()


def test_a_job_joins_the_cluster_it_was_submitted_to(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with cluster.cluster(CPU):
        (settings,) = fake.started
        assert "address" not in settings
        assert list(tmp_path.iterdir()) == []


def test_a_cluster_without_the_devices_is_refused_and_left(fake: FakeRay, tmp_path: Path):
    fake.total = {"CPU": 96.0}
    with (
        pytest.raises(ValueError, match="needs 8 TPU in the cluster, which has 0"),
        cluster.cluster(TPU),
    ):
        raise AssertionError
    assert fake.stopped == 1
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_does_not_start_leaves_nothing_behind(fake: FakeRay, tmp_path: Path):
    fake.error = ConnectionError("no port")
    with pytest.raises(ConnectionError), cluster.cluster(CPU):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


class Starting:
    """An actor that Ray has not started yet."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.error: Exception | None = None
        self.__ray_ready__ = SimpleNamespace(remote=self.wait)

    async def wait(self) -> None:
        await self.ready.wait()
        if self.error:
            raise self.error


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SAY_AFTER_S", 0.001)


@pytest.mark.usefixtures("impatient")
def test_who_waits_for_devices_says_so_and_goes_on_when_they_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    actors = [Starting(), Starting()]
    actors[1].error = RuntimeError("told by who calls it next")

    def line(processes: int, plan: Plan, *, learner: bool) -> str:
        actors[2 - processes].ready.set()
        return f"waiting for {processes} on {plan.platform}"

    monkeypatch.setattr(cluster, "_waiting_line", line)
    asyncio.run(cluster.wait_for_devices(actors, CPU))
    assert capsys.readouterr().out == "waiting for 2 on cpu\nwaiting for 1 on cpu\n"


def test_devices_that_are_there_are_not_talked_about(capsys: pytest.CaptureFixture[str]):
    actor = Starting()
    actor.ready.set()
    asyncio.run(cluster.wait_for_devices([actor], CPU))
    assert capsys.readouterr().out == ""


def holders(monkeypatch: pytest.MonkeyPatch, states: list[Any] | Exception) -> str:
    def list_actors(**settings: Any) -> list[Any]:
        if isinstance(states, Exception):
            raise states
        return states

    monkeypatch.setattr("ray.util.state.list_actors", list_actors)
    return cluster._waiting_line(1, TPU)


def test_the_line_says_what_is_waited_for_and_who_holds_it(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
):
    fake.total, fake.free = {"TPU": 8.0}, {"TPU": 4.0}
    states = [
        SimpleNamespace(class_name=name, job_id=job, pid=pid, required_resources=resources)
        for name, job, pid, resources in (
            ("Other", "07", 123, {"TPU": 4.0}),
            ("Mine", "own", 124, {"TPU": 8.0}),
            ("Idle", "08", 125, {}),
        )
    ]
    assert holders(monkeypatch, states) == (
        "waiting for devices: 1 process(es), 8 TPU in all (4 of 8 free); "
        "held by: Other of job 07 (pid 123): {'TPU': 4.0}"
    )


def test_the_line_says_what_it_does_not_know(fake: FakeRay, monkeypatch: pytest.MonkeyPatch):
    line = holders(monkeypatch, ConnectionError("no dashboard"))
    assert line.endswith("8 TPU in all (0 of 0 free); held by: unknown (ConnectionError)")
    assert holders(monkeypatch, []).endswith(
        "held by: nobody that the cluster lists; devices may still be starting"
    )
