"""Evaluate, chat and export of a finished run, and the same run in another placement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.run.run_folder import RunFolder
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    VALIDATED,
    Head,
    below,
    launch,
    write_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(3 * PATIENCE_S)]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wandb_records(file: Path) -> list[dict[str, Any]]:
    """What W&B's own reader finds in a `.wandb` file: by `type`, the content under that name."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(file)],
        env=os.environ | {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120.0,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_wandb_has_every_step_and_the_result(finished: Path):
    folder, wandb = RunFolder(finished), finished / "wandb"
    (name,) = {entry["wandb_id"] for entry in folder.events("started")}
    (file,) = wandb.glob(f"*run-*-{name}*/run-{name}.wandb")
    records = wandb_records(file)
    *_, last = folder.events("wandb")
    sync = f"wandb sync {wandb}/offline-run-*-{name}*"
    assert (last["uploaded"], last["sync"]) == (False, sync)

    def of(kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in records if record["type"] == kind]

    assert of("run")[0]["config"]["update"]["run"]["name"] == "finished"
    rows = [record["item"] for record in of("history")]
    by_step = {row["step"]: row for row in rows if "step" in row}
    assert list(by_step) == [row["step"] for row in folder.metrics]
    for row in folder.metrics:
        numbers = {key: value for key, value in row.items() if not isinstance(value, str)}
        assert numbers == {key: by_step[row["step"]][key] for key in numbers}
    (tested,) = [row for row in rows if row.get("eval/test_after/version") == 2]
    summary = {key: value for one in of("summary") for key, value in one.get("update", {}).items()}
    final = folder.summary
    assert final is not None
    assert summary["ended"] == "finished"
    assert summary["eval/after/accuracy"] == final["eval"]["after"]["accuracy"]
    assert tested["eval/test_after/accuracy"] == final["eval"]["after"]["accuracy"]
    rollouts = list(folder.read_rollouts("step_000001"))
    recorded = {record["text"] for record in rollouts}
    (file,) = wandb.glob(f"offline-run-*/files/{by_step[1]['rollouts.path']}")
    table = json.loads(file.read_text())
    at = table["columns"].index("text")
    assert {line[at] for line in table["data"]} <= recorded
    for chart in ("reward", "advantage", "tokens"):
        assert sum(by_step[1][f"histogram/{chart}.values"]) == len(rollouts)
    (logged,) = [one for one in of("artifact") if one["name"] == f"export-{name}"]
    adapter = finished / "export" / "adapter"
    kept = {one["path"]: Path(one["local_path"]) for one in logged["manifest"]["contents"]}
    assert kept.keys() == {file.name for file in adapter.iterdir()}
    for path, copy in kept.items():
        assert copy.is_relative_to(wandb)
        assert copy.read_bytes() == (adapter / path).read_bytes()


def test_an_evaluation_repeats_the_answers_of_the_run(head: Head, finished: Path):
    """Twice as many samplers with other batches give the same answers, up to ties."""
    settings = ["--plan.samplers=2", "--plan.slots=3", "--plan.prompt_buckets=[48]"]
    status, output = head.run(*launch("evaluate", finished, *settings))
    assert status == 0, output
    (file,) = (finished / "evaluations").glob("*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = read_jsonl(file.with_suffix(".answers.jsonl"))
    assert f"{file}\n{file.with_suffix('.answers.jsonl')}\n" in output
    for policy, name in (("base", "test_before"), ("tuned", "test_after")):
        expected = [row["text"] for row in read_jsonl(finished / "rollouts" / f"{name}.jsonl")]
        texts = [row["text"] for row in rows if row["policy"] == policy]
        assert len(texts) == len(expected) == 8
        assert sum(one != other for one, other in zip(texts, expected, strict=True)) <= 1
    one = found["sets"]["test"]
    assert (one["prompts"], one["base"]["n"], one["tuned"]["n"]) == (8, 8, 8)
    assert f"{one['base']['accuracy']:.1%} -> {one['tuned']['accuracy']:.1%}" in output
    summary = json.loads((finished / "summary.json").read_text(encoding="utf-8"))
    assert found["tuned"]["sha256"] == summary["adapter_sha256"]
    assert (found["tuned"]["version"], found["base"]["version"]) == (2, 0)
    assert found["base"]["sha256"] != found["tuned"]["sha256"]


@pytest.mark.slow
def test_a_colocated_run_on_two_devices_samples_the_same(
    head: Head, finished: Path, tmp_path: Path
):
    """Placement does not change the policy: equal rollouts up to ties."""
    config = write_config(tmp_path, name="colocated")
    settings = ["--budget.steps=1", "--plan.placement=colocated", "--plan.learner_devices=2"]
    settings += ["--plan.micro_batch_tokens=1664"]
    settings += ["--plan.slots=none", "--plan.slot_buckets=none"]  # chosen by measurement
    # A harmful update is not exported: the best version is read from its file.
    settings += [*VALIDATED, "--learner.lr=1.0"]
    status, output = head.run(*launch("train", config, *settings))
    assert status == 0, output
    colocated = tmp_path / "runs" / "colocated"
    texts = [
        [row["text"] for row in read_jsonl(folder / "rollouts" / "step_000001.jsonl")]
        for folder in (finished, colocated)
    ]
    same = sum(one == other for one, other in zip(*texts, strict=True))
    assert same >= len(texts[0]) - 1
    found = json.loads((colocated / "summary.json").read_text())
    assert (found["best"]["step"], found["best"]["last_step"]) == (0, 1)
    assert found["best"]["last_accuracy"] < found["best"]["accuracy"]
    assert found["eval"]["after"] == found["eval"]["before"]


def test_base_and_tuned_answer_side_by_side(head: Head, finished: Path):
    questions = "tom has 9 books. he sells 4. how many books are left?\n" + "x" * 99 + "\n"
    status, output = head.run(*launch("chat", finished), text=questions)
    assert status == 2, output  # the second question is too long, the first was answered
    lines = output.splitlines()
    title = next(number for number, line in enumerate(lines) if line.startswith("base  "))
    assert lines[title].split() == ["base", "|", "tuned"]
    assert f"tuned: step 2 of {finished}" in output
    assert lines[title + 2].count("<reasoning>") == 2
    assert "rollout.max_prompt_tokens = 64" in output


def test_an_export_after_training_equals_the_runs_own(head: Head, finished: Path, tmp_path: Path):
    out = tmp_path / "out"
    status, output = head.run(
        *launch("export", f"{finished}@last", "--out", out, "--format", "hf", "peft", "orbax")
    )
    assert status == 0, output
    assert "hf, peft, orbax: written and loaded back: log-probs of " in output
    assert output.endswith(f"exported: {out}\n")
    assert (out / "flax").is_dir()
    for file in ("model.safetensors", "adapter/adapter_model.safetensors", "config.json"):
        assert (out / file).read_bytes() == (finished / "export" / file).read_bytes(), file


def test_ctrl_c_ends_an_evaluation_in_order(head: Head, finished: Path, tmp_path: Path):
    file = tmp_path / "result.json"
    process = head.start(*launch("evaluate", finished, "--json", file))
    assert process.stdout is not None
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.start()
    for line in process.stdout:
        if line.startswith("Devices acquired"):
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    timer.cancel()
    assert process.returncode == 130, output
    assert "stopping: nothing is written" in output
    assert "Traceback" not in output
    assert not file.exists()
    _, alive = psutil.wait_procs(below(head.process, "SamplerActor"), timeout=PATIENCE_S)
    assert not alive
