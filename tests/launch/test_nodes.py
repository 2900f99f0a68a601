"""A run whose learner is on another node, which does not share the run folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.run.run_folder import RunFolder
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    PROJECT,
    Head,
    running_head,
    running_node,
    train_command,
    write_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(4 * PATIENCE_S)]


def train(head: Head, config: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        train_command(config, *settings),
        cwd=PROJECT,
        env=head.environment | {"RAY_ADDRESS": head.gcs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    found = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return found.returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs a mount namespace of its own: run as root")
def test_invariant_12_a_learner_on_a_node_without_the_checkpoints_changes_nothing(tmp_path):
    config = write_config(tmp_path, name="moved")
    run = RunFolder(tmp_path / "runs" / "moved")
    with running_head(cpus=0) as head:
        with running_node(head, tmp_path / "here.log"):
            begun = train(head, config)
            assert begun.returncode == 0, begun.stdout
        before = contents(run.path)
        with running_node(head, tmp_path / "elsewhere.log", without=tmp_path / "runs"):
            refused = train(head, config, "--budget.steps=4")
        assert refused.returncode == 2, refused.stdout
        assert f"the journal in {run.path} on host" in refused.stdout
        assert "lists checkpoints up to step 2, and the learner finds none" in refused.stdout
        assert "Traceback" not in refused.stdout
        assert contents(run.path) == before
        with running_node(head, tmp_path / "back.log"):
            resumed = train(head, config, "--budget.steps=4")
        assert resumed.returncode == 0, resumed.stdout
        assert "resuming after step 2" in resumed.stdout
        assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
