"""The private cluster of a command: start, network addresses, and that nothing of it remains."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from launch import private_cluster
from launch.exits import EXIT_DIED, EXIT_FAILED, Failure
from launch.flags import SUPERVISOR
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    family,
    private_environment,
    start,
    train_command,
    wait_for_lines,
    write_config,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """Private folders of fake clusters, which must be removed."""
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(variable, "")  # so that the one of the cluster is removed
        monkeypatch.delenv(variable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private_cluster, "_MAX_PARENT_BYTES", len(str(tmp_path)))
    found = list[Path]()

    def init(*, address: str, include_dashboard: bool, _temp_dir: str, **settings: Any) -> None:
        assert (address, include_dashboard, settings) == ("local", False, {"num_cpus": 3})
        Path(_temp_dir).mkdir()
        found.append(Path(_temp_dir).parent)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    yield found
    assert list(tmp_path.glob("grpo-*")) == []


def test_a_cluster_has_a_private_folder_and_a_token(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/mine")
    with private_cluster.private_cluster(num_cpus=3):
        assert "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    for _ in range(2):  # Ray keeps the first token for as long as the process lives
        with private_cluster.private_cluster(num_cpus=3):
            assert folders[-1].parent == tmp_path
            assert folders[-1].stat().st_mode & 0o777 == 0o700
            assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_a_cluster_that_does_not_start_gives_one_sentence(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
):
    def fails(**_: Any) -> None:
        raise Exception("The node timed out.\nLong story.")

    monkeypatch.setattr(ray, "init", fails)
    told = r"^Ray did not start: The node timed out\. Is"
    for status in (EXIT_FAILED, EXIT_DIED):  # then its parent starts the run again
        with (
            pytest.raises(Failure, match=told) as failed,
            private_cluster.private_cluster(num_cpus=3),
        ):
            raise AssertionError
        assert failed.value.status == status
        monkeypatch.setenv(SUPERVISOR, "mark")
    assert folders == []


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
    process = start(train_command(config, *settings), private_environment())
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
