"""A host is lost; another one, with another folder and another user's home, finishes its run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.run.mirror_store import Store
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    family,
    finish,
    private_environment,
    start,
    train_command,
    write_config,
)
from tests.pipeline.run.s3_server import BUCKET, s3_server

pytestmark = [pytest.mark.ray, pytest.mark.timeout(3 * PATIENCE_S)]
SETTINGS = ("--checkpoint.every_steps=1", f"--run.mirror=s3://{BUCKET}/runs")


def wait_until(is_so: Callable[[], bool]) -> None:
    """Returns when a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_checkpoint(store: Store) -> bool:
    """Whether a mirror has a checkpoint."""
    manifest = store.newest()
    return manifest is not None and manifest.checkpoint is not None


def test_another_host_ends_with_the_same_adapter(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    homes = [tmp_path / name for name in ("ann", "bob")]
    for home in homes:
        home.mkdir()
    with s3_server(monkeypatch):
        command = train_command(write_config(homes[0], name="lost"), *SETTINGS)
        first = start(command, private_environment() | {"HOME": str(homes[0])})
        run = homes[0] / "runs" / "lost"
        wait_until((run / "checkpoints" / "1").is_dir)
        os.kill(first.pid, signal.SIGSTOP)  # it would end before it is copied
        has_ended = (run / "summary.json").exists()
        wait_until(lambda: has_checkpoint(Store(f"s3://{BUCKET}/runs/lost")))
        for process in family(first.pid):
            process.kill()
        first.communicate(timeout=PATIENCE_S)
        shutil.rmtree(homes[0])
        command = train_command(write_config(homes[1], name="lost"), *SETTINGS)
        status, output = finish(start(command, private_environment() | {"HOME": str(homes[1])}))
    assert status == 0, output
    assert "from s3://bucket/runs/lost (of host " in output
    summaries = [
        json.loads((run / "summary.json").read_text(encoding="utf-8"))
        for run in (homes[1] / "runs" / "lost", finished)
    ]
    there, whole = summaries
    assert has_ended or there["resumed_from"] in {1, 2}
    assert there["adapter_sha256"] == whole["adapter_sha256"]
    assert there["eval"]["after"] == whole["eval"]["after"]
