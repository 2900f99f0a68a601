"""Runs as `ray job submit` jobs: complete, stopped, refused, on another node."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    SECRETS,
    FinishedJob,
    Head,
    below,
    check_time,
    finish,
    launch,
    ray,
    running_head,
    running_node,
    start_submission,
    submit,
    wait_for_lines,
    wait_until,
    write_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(2 * PATIENCE_S)]


def job_id(output: str) -> str:
    """Returns the submission id that a submission printed."""
    (found,) = re.findall(
        r"^submitted job (\S+); to stop it .*: .*ray job stop .* \1$", output, re.MULTILINE
    )
    return str(found)


def test_a_submitted_job_leaves_a_complete_run_folder_and_shows_no_secret(
    head: Head, job: FinishedJob
):
    assert job.status == 0, job.output
    assert "step 2/2" in job.output
    assert f"finished: {job.run}\n" in job.output
    assert (job.run / "export" / "model.safetensors").is_file()
    summary = json.loads((job.run / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["samples"]) == ("finished", 2, 32)
    check_time(job.run)
    shown = head.get("/api/jobs/") + head.get("/api/v0/jobs?detail=1")
    assert job_id(job.output) in shown
    files = [path for path in job.run.rglob("*") if path.is_file()]
    assert any("wandb" in str(path) for path in files)
    texts = [job.output.encode(), shown.encode(), *(path.read_bytes() for path in files)]
    found = [name for name, key in SECRETS.items() if any(key.encode() in text for text in texts)]
    assert found == []


REWARDS = """
from parts.scale import STEP

def length(inputs):
    return [STEP * len(i.completion) for i in inputs]

def interrupts(inputs):
    raise KeyboardInterrupt("\\udc80")
"""


def test_a_job_has_the_users_rewards_and_its_stop_leaves_a_checkpoint(head, tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/own.py").write_text("from twice import double\n")
    (tmp_path / "beside/twice.py").write_text("def double(completion): return 2.0\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/scale.py").write_text("STEP = 0.5\n")
    config = write_config(tmp_path, name="own")
    parts = (
        '[{ name = "length", function = "my_rewards:length" },'
        ' { name = "file", function = "beside/own.py:double", weight = 1.0 },'
        ' { name = "seen", function = "my_rewards:interrupts", weight = 0.0 }]'
    )
    text = config.read_text()
    before = '[{ name = "exact", function = "rewards.correctness:exact_answer" }]'
    assert before in text
    config.write_text(text.replace(before, parts))
    settings = ["--wandb.mode=disabled", "--budget.steps=500", "--checkpoint.every_steps=400"]
    status, output = submit(head, "--no-wait", config.name, *settings, folder=tmp_path)
    assert status == 0, output
    (tmp_path / "beside/twice.py").write_text("")  # the job has it as it was
    name = job_id(output)
    run = tmp_path / "runs" / "own"
    wait_for_lines(run / "metrics.jsonl", 1)
    _, output = finish(ray(head, "job", "stop", name))
    assert "was stopped" in output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == "interrupted"
    assert summary["steps"] >= 1
    assert (run / "checkpoints" / str(summary["steps"])).is_dir()
    # The user's functions have scored the rollouts, and their errors have been counted.
    rows = [
        json.loads(line)
        for line in (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 16
    assert [row["reward"] for row in rows] == [0.5 * len(row["text"]) + 2.0 for row in rows]
    assert {row["rewards"]["seen"] for row in rows} == {None}
    assert summary["faults"]["reward_errors"] == 16 * summary["steps"]
    assert r"raised KeyboardInterrupt: \\udc80" in (run / "journal.jsonl").read_text()


@pytest.mark.slow
def test_rays_own_command_runs_the_folder_of_the_project(head, tmp_path):
    """As README has it; the upload has neither the environment nor runs."""
    config = f"--run.dir={tmp_path}/runs --run.name=plain --budget.steps=1 --wandb.mode=disabled"
    config += " --data.validation.limit=8 --data.test.limit=8"
    train = ["python", "-m", "launch.train", "configs/demo.toml", *config.split()]
    status, output = finish(ray(head, "job", "submit", "--working-dir", ".", "--", *train))
    assert status == 0, output
    assert f"finished: {tmp_path}/runs/plain" in output


def test_leased_tpus_without_a_tpu_are_refused(head, tmp_path):
    """The cluster claims four chips; JAX finds none; no other device is used."""
    config = write_config(tmp_path, name="pretended")
    settings = ["--plan.platform", "tpu", "--plan.placement", "colocated"]
    settings += ["--plan.learner_devices", "4", "--plan.micro_batch_tokens", "3328"]
    status, output = head.run(*launch("train", config, *settings))
    assert status == 2, output
    assert "needs 4 tpu device(s)" in output
    assert not (tmp_path / "runs" / "pretended").exists()


# --- a cluster of two nodes with separate folders


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


@pytest.mark.slow
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
