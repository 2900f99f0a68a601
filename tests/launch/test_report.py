"""The command `launch.report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.report import main
from tests.pipeline.run.report.test_run_page import checked
from tests.samples import make_config
from tests.stub_workers import StubRun


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    process = StubRun(make_config(tmp_path / "runs"))
    assert process.run() == "finished"
    return process.folder.path


def test_several_runs_are_compared(run: Path, tmp_path: Path):
    config = make_config(tmp_path / "runs", run={"name": "faster"}, learner={"lr": 1e-5})
    other = StubRun(config)
    assert other.run() == "finished"
    page = tmp_path / "both.html"
    assert main([str(run), str(other.folder.path), "--out", str(page)]) == 0
    checked(page.read_text(encoding="utf-8"))
    assert "faster against run" in page.read_text(encoding="utf-8")


def test_a_run_has_a_page_in_its_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run: ")
    assert shown.endswith(f"report: {run}/report.html\n")
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
