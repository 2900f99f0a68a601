"""`launch.runs` lists runs and checkpoints, `launch.report` writes pages of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import report, runs
from pipeline.run.run_folder import RunFolder
from tests.launch.small_run import write_best, write_checkpoint
from tests.pipeline.run.report.test_run_page import checked
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
    assert runs.main([str(folder.path.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["run", "finished", "4/4"]
    file = tmp_path / "runs.json"
    assert runs.main([str(folder.path), "--json", str(file)]) == 0
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


def test_a_run_has_a_page_and_several_are_compared(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    assert report.main([str(folder.path)]) == 0
    assert capsys.readouterr().out.endswith(f"report: {folder.path}/report.html\n")
    assert (folder.path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    config = make_config(tmp_path / "runs", run={"name": "faster"}, learner={"lr": 1e-5})
    other, page = StubRun(config), tmp_path / "both.html"
    other.run()
    assert report.main([str(folder.path), str(other.folder.path), "--out", str(page)]) == 0
    checked(page.read_text(encoding="utf-8"))
    assert "faster against run" in page.read_text(encoding="utf-8")
