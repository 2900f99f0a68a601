"""A run on a cluster of two nodes with separate folders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    below,
    finish,
    running_head,
    running_node,
    start_submission,
    submit,
    wait_until,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(PATIENCE_S)]

ON = """
import os, sys
if "launch.train" in sys.orig_argv:
    from ray._private import services
    connect = services.get_node_to_connect_for_driver
    services.get_node_to_connect_for_driver = (
        lambda gcs, **_: connect(gcs, node_name=os.environ["NODE"])
    )
"""
"""Connects a run to the node named NODE; on another host it would be the only one there."""


def node_of(name: str, nodes: dict[str, int], command: subprocess.Popen[str]) -> str:
    """Waits for the process of an actor; returns its node, of those given with their pids."""
    found = list[str]()

    def is_there() -> bool:
        found[:] = [node for node, pid in nodes.items() if below(pid, f"ray::{name}")]
        return bool(found)

    wait_until(is_there, command)
    return found[0]


def test_a_job_runs_on_a_node_with_the_devices_where_the_head_has_none(tmp_path: Path):
    """The usual form of KubeRay and `ray up`; the run's process reserves nothing itself."""
    config, run = write_config(tmp_path, name="placed"), tmp_path / "runs" / "placed"
    settings = ["--budget.steps=1", "--wandb.mode=disabled"]
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ON)
    variables = {"NODE": "second", "PYTHONPATH": str(site)}
    with (
        running_head(cpus=0) as head,
        running_node(head, tmp_path / "second", cpus=2, **variables) as node,
    ):
        nodes = {"head": head.process, "second": node}
        status, output = submit(head, config, *settings, "--node=10.9.8.7", folder=tmp_path)
        assert (status, run.exists()) == (2, False), output
        assert "--node 10.9.8.7: the cluster has no such node; it has node " in output
        command = start_submission(head, config, *settings, folder=tmp_path)
        assert node_of("LearnerActor", nodes, command) == "second"
        status, output = finish(command)
    assert status == 0, output
    assert "the run's process and folder will be on node " in output
    assert json.loads((run / "summary.json").read_bytes())["ended"] == "finished"
