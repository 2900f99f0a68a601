"""`launch.runs` lists runs and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.runs import main
from pipeline.run.run_folder import RunFolder
from tests.launch.small_run import write_best, write_checkpoint
from tests.samples import make_config
from tests.stub_workers import StubRun

STEPS = 4


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
        write_checkpoint(run.folder.path, step)
    write_best(run.folder.path, 2)
    return run.folder


def test_runs_and_their_checkpoints_are_listed_with_why_they_are_kept(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder.checkpoints / "5.orbax-checkpoint-tmp").mkdir()
    capsys.readouterr()
    assert main([str(folder.path.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["run", "finished", "4/4"]
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
    for one in run["checkpoints"]:
        assert one["kept"] in out
