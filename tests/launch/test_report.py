"""The command `launch.report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.report import main
from tests.fakes import Disk, Process, make_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    process = Process(make_config(tmp_path / "runs"), disk=Disk())
    assert process.run() == "finished"
    return process.folder.path


def test_the_page_is_written_into_the_run_folder(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run: ")
    assert shown.endswith(f"report: {run}/report.html\n")
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_several_runs_are_compared(run: Path, tmp_path: Path):
    assert main([str(run), str(run), "--out", str(tmp_path / "both.html")]) == 0
    assert "<h2" in (tmp_path / "both.html").read_text(encoding="utf-8")


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run) + "s"]) == 2
    assert "command line: RUN_DIR: no folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main([str(run), "--out", str(tmp_path)]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
