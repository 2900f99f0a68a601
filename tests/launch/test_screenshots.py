"""The picture of the console, drawn from the records of a run."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from launch.demo.screenshots import draw_console, main
from tests.samples import make_config, make_data
from tests.stub_workers import Disk, StubRun


def texts(picture: Path) -> str:
    """What the picture shows, without spaces."""
    found = re.findall(r"<text [^>]*>([^<]*)</text>", picture.read_text())
    return re.sub(r"\s", "", html.unescape("".join(found)))


def test_the_console_after_half_of_the_steps(tmp_path: Path):
    config = make_config(
        tmp_path,
        data={"validation": {"path": "validation.jsonl"}},
        budget={"steps": 5},
        eval={"every_steps": 1},
    )
    run = StubRun(config, disk=Disk(), data=make_data(validation=4))
    run.run()
    picture = tmp_path / "console.svg"
    draw_console(run.folder, picture)
    row = run.folder.metrics[2]
    shown = texts(picture)
    assert f"step{row['step']}/5sampling" in shown
    assert f"reward{row['reward/mean']:.3f},correct" in shown
    assert "bestvalidation" in shown
    assert shown.count("validation:accuracy") == 3  # before the first step, after one and two
    assert not re.search(r"@font-face|@import|url\(http|href=", picture.read_text())


def test_a_folder_without_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert f"{tmp_path} has no step; name the folder of a run" in capsys.readouterr().err
