"""The private cluster of a command: start, network addresses, and that nothing of it remains."""

from __future__ import annotations

import re
import tempfile
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


def test_a_cluster_that_does_not_start_gives_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def fails(**_: Any) -> None:
        raise Exception("The node timed out.\nLong story.")

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private_cluster, "_MAX_PARENT_BYTES", len(str(tmp_path)))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the user")
    told = r"^Ray did not start: The node timed out\. Is"
    for status in (EXIT_FAILED, EXIT_DIED):  # then its parent starts the run again
        with (
            pytest.raises(Failure, match=told) as failed,
            private_cluster.private_cluster(num_cpus=3),
        ):
            raise AssertionError
        assert failed.value.status == status
        monkeypatch.setenv(SUPERVISOR, "mark")
    assert [*tmp_path.iterdir()] == []


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
    raylet = next(one for one in processes if one.name() == "raylet")
    assert len(raylet.environ()["RAY_AUTH_TOKEN"]) == 64
    (folder,) = set(re.findall(r"/\S*/grpo-[^/]+(?=/r/)", " ".join(raylet.cmdline())))
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    raylet.kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert output.count("; it is started again, and the run resumes") == 1, output
    assert "Traceback" not in output
    assert "state-dump" not in output
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []
    assert not Path(folder).exists()
