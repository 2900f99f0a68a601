"""Runs on a cluster of several nodes with separate folders: placement, deaths, nodes exchanged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    Head,
    family,
    finish,
    running_node,
    start,
    train_command,
    wait_for_events,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(PATIENCE_S)]

ON = r"""
import sys
from launch import train
from ray._private import services

connect = services.get_node_to_connect_for_driver
services.get_node_to_connect_for_driver = lambda gcs, **_: connect(gcs, node_name=sys.argv[1])
sys.exit(train.main([*sys.argv[2:], "--no-supervise"]))
"""
"""`launch.train` on the node of this name, which on another host would be the only one there."""


def node_of(name: str, nodes: dict[str, int], command: subprocess.Popen[str]) -> str:
    """Waits for the process of an actor; returns its node, of those given with their pids."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for node, pid in nodes.items():
            for process in family(pid):
                try:
                    found = f"ray::{name}" in " ".join(process.cmdline())
                except psutil.NoSuchProcess:
                    continue
                if found:
                    return node
        assert command.poll() is None, command.communicate()[0]
        time.sleep(0.2)
    raise AssertionError(f"no process of {name}")


def kill(pid: int) -> None:
    """Ends a node: all of its processes at once."""
    for process in reversed(family(pid)):
        with suppress(psutil.NoSuchProcess):  # it ended since
            process.kill()


def summary(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "summary.json").read_bytes()))


def test_a_run_survives_a_dead_node_and_an_exchange_of_nodes(
    head: Head, finished: Path, tmp_path: Path
):
    """A sampler's node dies under a run; then another node has the driver, and the learner."""
    config = write_config(tmp_path, name="finished")
    run = tmp_path / "runs" / "finished"
    with (
        running_node(head, tmp_path / "second") as second,
        running_node(head, tmp_path / "third") as third,
    ):
        nodes = {"head": head.process, "second": second, "third": third}
        command = head.start(*train_command(config, "--budget.steps=1"))
        assert node_of("LearnerActor", nodes, command) == "head"
        dying = node_of("SamplerActor", nodes, command)
        assert dying != "head"
        wait_for_events(run, "started", 1, command)
        kill(nodes.pop(dying))
        (left,) = nodes.keys() - {"head"}
        assert node_of("SamplerActor", {left: nodes[left]}, command) == left
        status, output = finish(command)
        assert status == 0, output
        assert output.count("; it is started again") >= 1, output

        environment = head.environment | {"RAY_ADDRESS": head.gcs, "HOME": str(tmp_path / left)}
        exchanged = [sys.executable, "-c", ON, left, *train_command(config)[3:]]
        command = start(exchanged, environment)
        assert node_of("LearnerActor", nodes, command) == left
        assert node_of("SamplerActor", nodes, command) == "head"
        status, output = finish(command)
    assert status == 0, output
    assert "resuming after step 1" in output
    assert summary(run)["adapter_sha256"] == summary(finished)["adapter_sha256"]
