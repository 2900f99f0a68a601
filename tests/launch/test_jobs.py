"""Runs as `ray job submit` jobs on a real cluster: complete, stopped, refused, cleaned up after."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    PROJECT,
    Head,
    running_head,
    train_command,
    write_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture(scope="module")
def head():
    with running_head() as found:
        yield found


def submit(
    head: Head, *arguments: object, folder: Path = PROJECT, **more: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", f"{PROJECT}/launch/submit.sh", *map(str, arguments)],
        cwd=folder,
        env=head.environment | {"GEMMA_GRPO_PYTHON": sys.executable} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def jobs(head: Head) -> str:
    return head.ray("job", "list", "--log-style", "record").stdout


def job_id(output: str) -> str:
    """Returns the submission id that a submission printed."""
    (found,) = re.findall(
        r"^submitting job (\S+); to stop it .*: .*ray job stop \1$", output, re.MULTILINE
    )
    return str(found)


def test_a_submitted_job_leaves_a_complete_run_folder(head, tmp_path):
    config = write_config(tmp_path, name="whole")
    job = submit(head, config, WANDB_API_KEY="k" * 40, WANDB_MODE="offline")
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, output
    assert "step 2/2" in output
    run = tmp_path / "runs" / "whole"
    for name in ("config.json", "journal.jsonl", "metrics.jsonl", "checkpoints/2", "wandb"):
        assert (run / name).exists(), name
    assert (run / "export" / "model.safetensors").is_file()
    assert len((run / "rollouts" / "step_000002.jsonl").read_text().splitlines()) == 16
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["samples"]) == ("finished", 2, 32)
    listed = jobs(head)
    assert "kkkk" not in listed
    assert job_id(output).startswith("whole-")
    assert f"submission_id='{job_id(output)}'" in listed
    assert "'job_name': 'whole'" in listed


REWARDS = """
from parts.scale import STEP

def length(inputs):
    return [STEP * len(i.completion) for i in inputs]

def interrupts(inputs):
    raise KeyboardInterrupt("\\udc80")
"""


def test_a_job_has_the_users_reward_modules_and_survives_their_errors(head, tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/scale.py").write_text("STEP = 0.5\n")
    config = write_config(tmp_path, name="own")
    parts = (
        '[{ name = "length", function = "my_rewards:length" },'
        ' { name = "seen", function = "my_rewards:interrupts", weight = 0.0 }]'
    )
    text = config.read_text().replace("launch/demo", f"{PROJECT}/launch/demo")
    before = '[{ name = "exact", function = "rewards.correctness:exact_answer" }]'
    assert before in text
    config.write_text(text.replace(before, parts))
    job = submit(head, config.name, "--wandb.mode", "disabled", folder=tmp_path)
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, output
    run = tmp_path / "runs" / "own"
    rows = [json.loads(line) for line in lines(run / "rollouts" / "step_000002.jsonl")]
    assert len(rows) == 16
    assert [row["reward"] for row in rows] == [0.5 * len(row["text"]) for row in rows]
    assert {row["rewards"]["seen"] for row in rows} == {None}
    assert json.loads((run / "summary.json").read_text())["faults"]["reward_errors"] == 32
    assert r"raised KeyboardInterrupt: \\udc80" in (run / "journal.jsonl").read_text()


def test_ray_job_stop_leaves_a_checkpoint(head, tmp_path):
    config = write_config(tmp_path, name="stopped")
    settings = ["--budget.steps", "500", "--checkpoint.every_steps", "400"]
    job = submit(head, "--no-wait", config, *settings)
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, output
    name = job_id(output)
    run = tmp_path / "runs" / "stopped"
    deadline = time.monotonic() + PATIENCE_S
    while not lines(run / "metrics.jsonl"):
        assert time.monotonic() < deadline, head.ray("job", "logs", name).stdout
    stopped = head.ray("job", "stop", name)
    assert "was stopped" in stopped.stdout + stopped.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == "interrupted"
    assert summary["steps"] >= 1
    assert (run / "checkpoints" / str(summary["steps"])).is_dir()


def test_a_mistake_is_reported_before_anything_is_submitted(head, tmp_path):
    before = jobs(head).count("submission_id")
    config = write_config(tmp_path, name="wrong")
    job = submit(head, config, "--learner.lr", "-1")
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 2
    assert "learner.lr" in output
    assert jobs(head).count("submission_id") == before


def test_leased_tpus_without_a_tpu_are_refused_and_free_again(head, tmp_path):
    """The cluster claims four chips; JAX finds none; no other device is used."""
    config = write_config(tmp_path, name="pretended")
    settings = ["--plan.platform", "tpu", "--plan.placement", "colocated"]
    settings += ["--plan.learner_devices", "4", "--plan.micro_batch_tokens", "3328"]
    done = subprocess.run(
        train_command(config, *settings),
        cwd=PROJECT,
        env=head.environment | {"RAY_ADDRESS": head.gcs},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "needs 4 tpu device(s)" in done.stderr
    assert not (tmp_path / "runs").exists()
    assert free_chips(head) == 4


KILLER = """
import ray
from actors.handles import spawn
from actors.placement import Lease

class Holder:
    def pid(self):
        import os
        return os.getpid()

ray.init(log_to_driver=False)
holder = spawn(Holder, lease=Lease({"TPU": 4}, {}), name="holder")
pid = ray.get(holder.pid.remote())
assert ray.available_resources().get("TPU", 0) == 0
import os, signal
os.kill(pid, signal.SIGKILL)
try:
    ray.get(holder.pid.remote())
except ray.exceptions.RayActorError:
    raise SystemExit(0)  # what is printed may stand in a line of Ray's own
raise SystemExit("still there")
"""


def test_the_chips_of_a_dead_actor_are_free_again(head):
    done = subprocess.run(
        [sys.executable, "-c", KILLER],
        cwd=PROJECT,
        env=head.environment | {"RAY_ADDRESS": head.gcs},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert free_chips(head) == 4


HOLDS = """
import ray, sys
from actors.handles import spawn
from actors.placement import Lease, Reservation

class Holder:
    pass

ray.init(log_to_driver=False)
count = int(sys.argv[1])
leases = [Lease({"TPU": 1}, {})] * count
devices = Reservation("run first", leases)
actors = [
    spawn(Holder, lease=one, name=f"run first: {number}", strategy=devices.bundle(number))
    for number, one in enumerate(leases)
]
ray.get([actor.__ray_ready__.remote() for actor in actors])
print("holding", flush=True)
sys.stdin.readline()
devices.release()
print("released", flush=True)
sys.stdin.readline()
"""
"""Another run, which holds some chips until it gets a line on standard input."""

WAITS = """
import asyncio, sys
import ray
from actors.handles import RunActors
from configs.load import load_config
from launch import cluster

cluster.REPORT_WAIT_EVERY_S = 0.2
settings = {"platform": "tpu", "learner_devices": 1, "samplers": 3}
config = load_config(sys.argv[1], [(f"plan.{key}", str(value)) for key, value in settings.items()])

async def run():
    actors = RunActors.spawn(config)
    await cluster.wait_for_devices(actors.devices, config.plan)
    print("placed; free:", ray.available_resources().get("TPU", 0), flush=True)
    actors.kill()

with cluster.cluster(config.plan):
    asyncio.run(run())
"""
"""A run with four processes of one chip each."""


def script(head: Head, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a driver on the cluster, without Ray's own output."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=PROJECT,
        env=head.environment | {"RAY_ADDRESS": head.gcs},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def next_line(process: subprocess.Popen[str], start: str) -> str:
    """Returns the next line with this prefix."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.rstrip("\n")
    raise AssertionError(f"no line {start}: exit status {process.wait()}")


def test_devices_are_taken_together_or_not_at_all(head, tmp_path):
    config = write_config(tmp_path, name="waits")
    first = script(head, HOLDS, 1)
    next_line(first, "holding")
    second = script(head, WAITS, config)
    # Three chips are free, and the run that needs four holds none of them.
    said = next_line(second, "waiting for devices: 4 TPU together (3 of 4 free); held by: ")
    assert said.endswith("run first (1 TPU)")
    assert first.stdin is not None
    first.stdin.write("\n")
    first.stdin.flush()
    next_line(first, "released")
    next_line(second, "placed; free: 0")
    for process in (second, first):
        process.communicate("\n", timeout=PATIENCE_S)
        assert process.returncode == 0
    assert free_chips(head) == 4


def test_runs_of_equal_names_do_not_collide(head):
    with script(head, HOLDS, 2) as first, script(head, HOLDS, 2) as second:
        for process in (first, second):
            next_line(process, "holding")
        for process in (first, second):
            process.communicate("\n\n", timeout=PATIENCE_S)
            assert process.returncode == 0
    assert free_chips(head) == 4


FREE = """
import ray, time
ray.init(log_to_driver=False)
until = time.monotonic() + 60
while ray.available_resources().get("TPU", 0) < 4 and time.monotonic() < until:
    time.sleep(0.2)
print("free:", ray.available_resources().get("TPU", 0))
"""


def free_chips(head: Head) -> float:
    """Returns the free chips; waits, because the cluster notices a death with a delay."""
    done = subprocess.run(
        [sys.executable, "-c", FREE],
        env=head.environment | {"RAY_ADDRESS": head.gcs},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("free: "))
    return float(line.removeprefix("free: "))
