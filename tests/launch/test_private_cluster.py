"""The private cluster of a command: start, network addresses, and that nothing of it remains."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from launch import private_cluster
from launch.exits import Failure
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    family,
    next_line,
    private_environment,
    train_command,
    wait_for_lines,
    write_config,
)
from tests.launch.cluster_fixtures import start as start_process

pytestmark = pytest.mark.slow


class FakeRay:
    """Fails to start a given number of times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.folders: list[Path] = []
        self.token = ""
        self.stopped = 0

    def init(self, *, address: str, include_dashboard: bool, _temp_dir: str, **settings: Any):
        assert (address, include_dashboard) == ("local", False)
        assert settings == {"num_cpus": 3}
        folder = Path(_temp_dir)
        folder.mkdir()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        self.folders.append(folder)
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", ""))
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o600
            self.token = path.read_text()
        if len(self.folders) <= self.failures:
            raise Exception("The node timed out.\nLong story.")

    def shutdown(self) -> None:
        self.stopped += 1


Start = Callable[..., FakeRay]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Starts a fake cluster, runs a body in it, and checks that nothing is left."""
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private_cluster, "_MAX_PARENT_BYTES", len(str(tmp_path)))

    def started(body: Callable[[FakeRay], None] = lambda _: None, *, failures: int = 0) -> FakeRay:
        fake = FakeRay(failures)
        monkeypatch.setattr(ray, "init", fake.init)
        monkeypatch.setattr(ray, "shutdown", fake.shutdown)
        with private_cluster.private_cluster(num_cpus=3):
            body(fake)
        return fake

    yield started
    assert list(tmp_path.glob("grpo-*")) == []


def test_the_cluster_has_a_private_folder_and_a_token_and_is_removed(start: Start, tmp_path: Path):
    def body(fake: FakeRay) -> None:
        assert fake.folders[0].parent.parent == tmp_path
        assert fake.stopped == 0

    fake = start(body)
    assert len(fake.token) == 64
    assert fake.stopped == 1
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    # Ray keeps the first token for as long as the process lives.
    assert start().token == fake.token


def test_a_token_of_the_user_is_used(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "mine"
    path.touch(mode=0o600)
    path.write_text("my own")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    assert start().token == "my own"


def test_a_folder_too_long_for_sockets_is_not_used(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    too_long = tmp_path / "1"
    too_long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    (folder,) = start().folders
    assert folder.parent.parent == Path("/tmp")
    assert not folder.parent.exists()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects the pauses between attempts, in seconds."""
    found: list[float] = []
    monkeypatch.setattr(private_cluster, "time", SimpleNamespace(sleep=found.append))
    return found


def test_a_failed_start_is_retried_in_a_new_folder(
    start: Start, pauses: list[float], capsys: pytest.CaptureFixture[str]
):
    def body(fake: FakeRay) -> None:
        assert [folder.exists() for folder in fake.folders] == [False, False, True]

    fake = start(body, failures=2)
    assert len(set(fake.folders)) == 3
    assert pauses == [2.0, 8.0]
    assert fake.stopped == 3
    assert capsys.readouterr().out.splitlines() == [
        f"Ray did not start: The node timed out. Retrying in {pause_s} s" for pause_s in (2, 8)
    ]


def test_a_cluster_that_never_starts_gives_one_sentence(start: Start, pauses: list[float]):
    with pytest.raises(Failure, match=r"^Ray did not start in 3 attempts: The node timed out\. Is"):
        start(failures=3)
    assert len(pauses) == 2


def test_sigterm_while_ray_starts_ends_the_command(start: Start, monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        start(failures=1)

    ended_by_signal = SimpleNamespace(sleep=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(private_cluster, "time", ended_by_signal)
    with pytest.raises(SystemExit) as ended:
        asyncio.run(run())
    assert ended.value.code == 143


# --- real clusters


BARE = """
import asyncio
from launch.private_cluster import private_cluster

async def wait():
    with private_cluster(num_cpus=1, log_to_driver=False, object_store_memory=2**27):
        print("started", flush=True)
        await asyncio.Event().wait()

asyncio.run(wait())
"""
"""A command that does nothing on its cluster."""


@pytest.mark.ray
@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("victim", ["driver", "gcs_server", "raylet"])
def test_nothing_remains_of_a_command_whose_ray_or_driver_is_killed(victim: str):
    process = start_process([sys.executable, "-c", BARE], private_environment())
    next_line(process, "started")
    processes = family(process.pid)
    assert {"raylet", "gcs_server"} <= {one.name() for one in processes}
    if victim == "driver":
        process.kill()
    else:
        next(one for one in processes if one.name() == victim).kill()
    if victim == "raylet":
        process.send_signal(signal.SIGINT)  # it has no actors, whose deaths it would notice
    process.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []


def is_open(process: psutil.Process) -> list[str]:
    """Returns addresses other than loopback that a process listens on."""
    connections: list[Any] = []
    with suppress(psutil.NoSuchProcess):
        connections = process.net_connections("inet")
    return [
        f"{process.pid}: {one.laddr}"
        for one in connections
        if one.status == psutil.CONN_LISTEN
        and one.laddr.ip not in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    ]


@pytest.mark.ray
@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_run_is_private_and_survives_the_end_of_its_raylet(tmp_path: Path):
    config = write_config(tmp_path, name="killed")
    settings = ["--budget.steps=3", "--checkpoint.every_steps=1"]
    process = start_process(train_command(config, *settings), private_environment())
    run = tmp_path / "runs" / "killed"
    wait_for_lines(run / "metrics.jsonl", 1, process)
    processes = family(process.pid)
    assert [line for one in processes for line in is_open(one)] == []
    next(one for one in processes if one.name() == "raylet").kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert output.count("; it is started again, and the run resumes") == 1, output
    assert "Traceback" not in output
    assert "state-dump" not in output
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []
