"""`launch.runs` lists runs and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.runs import main
from pipeline.run.run_folder import RunFolder
from tests.samples import make_config
from tests.stub_workers import StubRun

STEPS = 4


def add_checkpoint(folder: RunFolder, step: int, **facts: Any) -> Path:
    """Files as Orbax writes them, without arrays."""
    path = folder.checkpoints / str(step)
    (path / "facts").mkdir(parents=True)
    (path / "state").mkdir()
    for name in ("_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"):
        (path / name).write_bytes(b"x" * 1000)
    known = {"version": step, "adapter_sha256": f"{step:064x}", "meta": {"provenance": {"x": "y"}}}
    (path / "facts" / "metadata").write_text(json.dumps(known | facts))
    return path


def set_best(folder: RunFolder, version: int) -> None:
    file = folder.checkpoints / "best" / "adapter.safetensors"
    file.parent.mkdir(exist_ok=True)
    metadata = {"version": str(version), "sha256": ""}
    save_file({"x": np.zeros(3, np.float32)}, file, metadata=metadata)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A finished run of four steps with the checkpoints 1, 2, 3 and 4; 2 is the best one."""
    config = make_config(
        tmp_path / "runs",
        budget={"steps": STEPS},
        checkpoint={"every_steps": 1, "keep": 2, "keep_every": 3},
    )
    run = StubRun(config)
    run.run()
    for step in range(1, STEPS + 1):
        add_checkpoint(run.folder, step)
    set_best(run.folder, 2)
    return run.folder


def test_the_runs_of_a_folder_are_listed(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main([str(folder.path.parent)]) == 0
    title, row = capsys.readouterr().out.splitlines()
    columns = "run state steps best validation time goodput MB last activity"
    assert title.split() == columns.split()
    assert row.split()[:3] == ["run", "finished", "4/4"]


def test_the_checkpoints_of_a_run_are_listed_with_why_they_are_kept(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder.checkpoints / "5.orbax-checkpoint-tmp").mkdir()
    capsys.readouterr()
    file = tmp_path / "runs.json"
    assert main([str(folder.path), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "run: finished, 4 of 4 steps" in out
    (run,) = json.loads(file.read_text())["runs"]
    assert [(one["step"], one["kept"]) for one in run["checkpoints"]] == [
        (1, "until the next save"),
        (2, "best by validation"),
        (3, "one of the 2 newest, every 3 steps"),
        (4, "one of the 2 newest"),
    ]
    assert (run["state"], run["steps"]) == ("finished", 4)
    assert run["checkpoints"][0]["provenance"] == {"x": "y"}
    # Not times of files, which are those of the copy where a run came from its mirror.
    saved = {entry["step"]: entry["time"] for entry in folder.events("checkpoint")}
    assert [one["complete"] for one in run["checkpoints"]] == [saved[step] for step in (1, 2, 3, 4)]
    for one in run["checkpoints"]:
        assert one["kept"] in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["{run}/rollouts"], "neither a run folder nor a folder of runs"),
    ],
)
def test_a_mistake_is_a_sentence_and_changes_nothing(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
):
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    names = {"run": folder.path, "runs": folder.path.parent}
    assert main([one.format(**names) for one in arguments]) == 2
    assert told.format(**names) in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before
