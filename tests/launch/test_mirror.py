"""A host is lost; another one, with another folder and another user's home, finishes its run."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline.run.checkpoint_files import CHECKPOINT_MARK
from pipeline.run.mirror import open_store, sizes
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    Head,
    family,
    finish,
    private_environment,
    start,
    start_submission,
    train_command,
    wait_until,
    write_config,
)
from tests.launch.s3_server import BUCKET, s3_server

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3 * PATIENCE_S)]
SETTINGS = ("--checkpoint.every_steps=1", f"--run.mirror=s3://{BUCKET}/runs")


def has_checkpoint(url: str) -> bool:
    """Whether a mirror has a complete checkpoint."""
    return any(path.endswith(f"/{CHECKPOINT_MARK}") for path in sizes(open_store(url)))


def kill_child_of(submission: subprocess.Popen[str], head: Head) -> None:
    """Kills the first process that the parent of a submitted run starts."""
    child = None

    def has_started() -> bool:
        nonlocal child
        assert submission.poll() is None, submission.communicate()[0]
        for one in head.actors("launch.train submitted"):
            with suppress(psutil.NoSuchProcess):
                if "--no-supervise" in " ".join(one.cmdline()):
                    child = one
        return child is not None

    wait_until(has_started)
    assert child is not None
    child.kill()


def test_another_host_ends_with_the_same_adapter(
    head: Head, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other host is a Ray cluster; a submitted job takes the keys from its environment."""
    homes = [tmp_path / name for name in ("ann", "bob")]
    for home in homes:
        home.mkdir()
    with s3_server(monkeypatch) as server_url:
        command = train_command(write_config(homes[0], name="lost"), *SETTINGS)
        first = start(command, private_environment() | {"HOME": str(homes[0])})
        run = homes[0] / "runs" / "lost"
        wait_until((run / "checkpoints" / "1").is_dir)
        wait_until(lambda: has_checkpoint(f"s3://{BUCKET}/runs/lost"))
        has_ended = (run / "summary.json").exists()
        for process in family(first.pid):
            process.kill()
        first.communicate(timeout=PATIENCE_S)
        shutil.rmtree(homes[0])
        head.aws.write_text(f"[default]\nregion = us-east-1\nendpoint_url = {server_url}\n")
        submission = start_submission(head, write_config(homes[1], name="lost"), *SETTINGS)
        if not has_ended:
            kill_child_of(submission, head)
        status, output = finish(submission)
    assert status == 0, output
    assert output.count("fetching the run from s3://bucket/runs/lost") == 1
    assert has_ended or output.count("it is started again, and the run resumes") == 1
    run = homes[1] / "runs" / "lost"
    there, whole = (
        json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for folder in (run, finished)
    )
    assert has_ended or there["resumed_from"] in {1, 2}
    assert there["adapter_sha256"] == whole["adapter_sha256"]
    assert there["eval"]["after"] == whole["eval"]["after"]
