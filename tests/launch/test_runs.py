"""Whole runs: killed, interrupted, resumed; with little memory."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline.run.run_folder import RunFolder
from tests.launch.cluster_fixtures import (
    DATA,
    PATIENCE_S,
    VALIDATED,
    Head,
    below,
    check_time,
    family,
    finish,
    launch,
    private_environment,
    start,
    wait_for_events,
    wait_for_lines,
    write_config,
)
from tests.run_process import TIMINGS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(3 * PATIENCE_S)]
# One SFT step, then GRPO with a KL term towards the policy after that step.
WARM = [
    '--run.phases=["sft", "grpo"]',
    *(f"--sft.train.path={DATA}/demonstrations.jsonl", "--sft.train.limit=32"),
    *("--sft.steps=1", "--sft.sequences_per_step=4", "--learner.kl_coef=0.05"),
]

# Truncated rollouts wait for the next step and are part of checkpoints.
PARTIAL = [
    *("--rollout.partial=keep", "--rollout.cut_off=0.3", "--plan.segment_steps=2"),
    *("--learner.importance_cap=2", "--run.seed=1"),  # with this seed some wait at the checkpoint
]
START_PORT = 52365
"""Port of the agent of a `ray start`, without which it takes no jobs."""
AHEAD = [
    *("--rollout.ahead=one", "--learner.importance_cap=2"),
    *("--rollout.dynamic_sampling=capped", "--rollout.max_prompts_per_step=9"),
]


def metrics(run):
    rows = RunFolder(run).metrics
    return [{k: v for k, v in row.items() if k.partition("/")[0] not in TIMINGS} for row in rows]


def summary(run):
    return json.loads((run / "summary.json").read_text())


def journal(run):
    return list(RunFolder(run).entries())


@pytest.mark.slow
@pytest.mark.parametrize("how", [PARTIAL, AHEAD])
def test_promise_3_a_killed_and_resumed_run_is_the_same_run(head: Head, tmp_path: Path, how):
    settings = ["--budget.steps=4", "--learner.updates_per_batch=2", *WARM, *how, *VALIDATED]
    whole = write_config(tmp_path, name="whole")
    status, output = head.run(*launch("train", whole, *settings))
    assert status == 0, output

    killed = write_config(tmp_path, name="killed")
    process = start(launch("train", killed, *settings), private_environment())
    run = tmp_path / "runs" / "killed"
    wait_for_lines(run / "metrics.jsonl", 3, process)
    for one in family(process.pid):
        one.kill()
    process.communicate(timeout=PATIENCE_S)
    assert not (run / "summary.json").exists()
    assert RunFolder(run).recorded_used_s > 0

    status, output = head.run(*launch("train", killed, *settings))
    assert status == 0, output
    assert "resuming after step 2" in output
    assert summary(run)["resumed_from"] == 2
    expected = tmp_path / "runs" / "whole"
    assert summary(run)["adapter_sha256"] == summary(expected)["adapter_sha256"]
    assert adapters(run) == adapters(expected)
    assert metrics(run) == metrics(expected)
    assert summary(run)["rollouts"] == summary(expected)["rollouts"]
    if how is PARTIAL:
        assert metrics(run)[1]["rollout/partial"] > 0  # at the checkpoint that was resumed
        assert summary(run)["rollouts"]["continued"] > 0
    assert summary(run)["best"] == summary(expected)["best"]
    assert check_time(run)["lost"] > 0
    assert "lost" not in check_time(expected)
    for name in ("step_000002", "step_000004", "validation_000004", "test_after"):
        path = f"rollouts/{name}.jsonl"
        assert (run / path).read_bytes() == (expected / path).read_bytes(), name

    status, output = head.run(*launch("train", killed, *settings))
    assert status == 0
    assert "is finished after 4 steps" in output


def adapters(run: Path) -> dict[int, str]:
    """The hash of the adapter that was validated after each step."""
    entries = (entry for entry in journal(run) if entry["event"] == "evaluated")
    return {one["step"]: one["adapter_sha256"] for one in entries if one["name"] == "validation"}


def test_a_run_survives_deaths_and_a_hang_and_nothing_of_it_remains(finished: Path, tmp_path: Path):
    """A share of `launch.bench chaos`."""
    config, run = write_config(tmp_path, name="faulty"), tmp_path / "runs" / "faulty"
    (tmp_path / "mirror").mkdir()
    settings = ["--budget.steps=4", "--checkpoint.every_steps=1", "--wandb.mode=disabled"]
    settings += [f"--run.mirror={tmp_path}/mirror", "--faults.stuck_s=20"]
    process = start(launch("train", config, *settings), private_environment())

    def victim(role: str) -> psutil.Process:
        return below(process.pid, role)[0]

    wait_for_events(run, "started", 1, process)
    of_first = family(process.pid)
    assert [line for one in of_first for line in is_open(one)] == []
    for role in ("--no-supervise", "LearnerActor"):
        victim(role).suspend()
    process.kill()  # all end with it, also those that are stopped
    process.communicate(timeout=PATIENCE_S)
    process = start(launch("train", config, *settings), private_environment())
    wait_for_events(run, "started", 2, process)
    victim("rewards.processes").kill()  # it is replaced, and the run goes on
    wait_for_lines(run / "metrics.jsonl", 1, process)
    victim("SamplerActor").kill()
    wait_for_events(run, "started", 3, process)  # the next step may end before the death is found
    wait_for_lines(run / "metrics.jsonl", 2, process)
    raylet = next(one for one in family(process.pid) if one.name() == "raylet")
    (folder,) = set(re.findall(r"/\S*/grpo-[^/]+(?=/r/)", " ".join(raylet.cmdline())))
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert len(raylet.environ()["RAY_AUTH_TOKEN"]) == 64
    raylet.kill()
    wait_for_events(run, "started", 4, process)
    wait_for_lines(run / "metrics.jsonl", 3, process)
    # Not the learner: if it is writing a checkpoint, the limit is 1,800 s.
    victim("SamplerActor").suspend()
    status, output = finish(process)
    assert status == 0, output
    assert "Traceback" not in output
    died, _, hung = (one["why"] for one in journal(run) if one["event"] == "restarted")
    assert died == "a process of the run died"
    assert hung == "the run made no progress for 20 s (faults.stuck_s)"
    died = "sampler 0: its process ended unexpectedly"
    assert f"{died}; the same command continues from the last checkpoint\n" in output
    assert summary(run)["faults"]["reward_errors"] == 0
    for name in ("test_before", "step_000001", "step_000002"):
        path = f"rollouts/{name}.jsonl"
        assert (run / path).read_bytes() == (finished / path).read_bytes(), name
    # The third step is sampled by the adapter with which the undisturbed run ended.
    drawn = {row["adapter_sha256"] for row in RunFolder(run).read_rollouts("step_000003")}
    assert drawn == {summary(finished)["adapter_sha256"]}
    copied = (tmp_path / "mirror" / "faulty" / "summary.json").read_bytes()
    assert copied == (run / "summary.json").read_bytes()
    check_time(run)
    _, alive = psutil.wait_procs(of_first, timeout=PATIENCE_S)
    assert alive == []
    assert not Path(folder).exists()


def is_open(process: psutil.Process) -> list[str]:
    """Returns addresses other than free ports of loopback that a process listens on."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for one in process.net_connections("inet"):
            private = one.laddr.ip in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
            if one.status == psutil.CONN_LISTEN and not (private and one.laddr.port != START_PORT):
                found.append(f"{process.pid}: {one.laddr}")
    return found
