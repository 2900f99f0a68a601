"""The command `launch.report`."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from launch.report import main
from pipeline.evaluate.summary import show_mean
from pipeline.run.run_folder import RunFolder
from tests.pipeline.run.report.test_run_page import checked
from tests.samples import make_config
from tests.stub_workers import StubRun


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    process = StubRun(make_config(tmp_path / "runs"))
    assert process.run() == "finished"
    return process.folder.path


def text_of(page: Path) -> str:
    """What a page shows, its cells and lines separated by spaces."""
    written = page.read_text(encoding="utf-8")
    body = re.sub(r"<(style|script|svg)\b.*?</\1>", " ", written, flags=re.DOTALL)
    return " ".join(unescape(re.sub("<[^>]+>", " ", body)).split())


def test_several_runs_are_compared(run: Path, tmp_path: Path):
    config = make_config(tmp_path / "runs", run={"name": "faster"}, learner={"lr": 1e-5})
    other = StubRun(config)
    assert other.run() == "finished"
    page = tmp_path / "both.html"
    assert main([str(run), str(other.folder.path), "--out", str(page)]) == 0
    checked(page.read_text(encoding="utf-8"))
    shown = text_of(page)
    assert re.search(r"\d gained, \d lost of \d", shown)
    assert shown.startswith("run, faster: comparison run and faster run")
    first, second = (RunFolder(path).summary for path in (run, other.folder.path))
    assert first is not None
    assert second is not None
    means = " -> ".join(show_mean(one["eval"]["after"]) for one in (first, second))
    assert f"faster against run test_after {means}: " in shown
    generated = [f"{one['tokens_generated']:,}" for one in (first, second)]
    assert f"tokens generated {' '.join(generated)}" in shown
    assert shown.endswith("Settings that differ setting run faster learner.lr 5e-05 1e-05")


def test_a_run_has_a_page_in_its_folder_and_mistakes_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run: ")
    assert shown.endswith(f"report: {run}/report.html\n")
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    for arguments, told in (
        ([], ["required: RUN_DIR; --help describes the command"]),
        ([f"{run}s", f"{run}t"], 2 * ["command line: RUN_DIR: no folder"]),
        ([str(tmp_path)], ["not a run folder"]),
        ([str(run), "--out", str(tmp_path)], ["is a folder; name a file"]),
    ):
        assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert all(one in line for one, line in zip(told, lines, strict=True))
