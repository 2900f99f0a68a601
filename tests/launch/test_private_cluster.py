"""The private cluster of a command: start, network addresses, and that nothing of it remains."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from launch import private_cluster
from launch.exits import EXIT_DIED, Failure
from launch.flags import SUPERVISOR
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    family,
    private_environment,
    train_command,
    wait_for_lines,
    write_config,
)
from tests.launch.cluster_fixtures import start as start_process

pytestmark = pytest.mark.slow


class FakeRay:
    """Starts, or fails to."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
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
        if self.fails:
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

    def started(
        body: Callable[[FakeRay], None] = lambda _: None, *, fails: bool = False
    ) -> FakeRay:
        fake = FakeRay(fails=fails)
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


def test_a_cluster_that_does_not_start_gives_one_sentence(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    for supervised, status in ((False, 1), (True, EXIT_DIED)):
        if supervised:
            monkeypatch.setenv(SUPERVISOR, "/folder")
        with pytest.raises(Failure, match=r"^Ray did not start: The node timed out\. Is") as failed:
            start(fails=True)
        assert failed.value.status == status


# --- real clusters


_START_PORT = 52365
"""Port of the agent of a `ray start`, without which it takes no jobs."""


def is_open(process: psutil.Process) -> list[str]:
    """Returns addresses other than free ports of loopback that a process listens on."""
    connections: list[Any] = []
    with suppress(psutil.NoSuchProcess):
        connections = process.net_connections("inet")
    return [
        f"{process.pid}: {one.laddr}"
        for one in connections
        if one.status == psutil.CONN_LISTEN
        and (
            one.laddr.ip not in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
            or one.laddr.port == _START_PORT
        )
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
