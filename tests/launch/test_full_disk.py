"""A disk that is full while one kind of file is written: one sentence, and the run resumes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from launch.exits import exit_status
from tests.launch.test_session import Session
from tests.run_process import left_behind
from tests.samples import make_config
from tests.stub_workers import Disk

pytestmark = pytest.mark.slow

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
STEPS: dict[str, Any] = {"budget": {"steps": 4}}


def fill(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """Makes writes of a file fail, after some successful ones, once a part of it is written."""
    opened, left = Path.open, [after]

    def open_file(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.name in {name, f"{name}.tmp"} and mode[0] in "aw":
            left[0] -= 1
            if left[0] < 0:
                with opened(path, mode[0] + "b") as file:
                    file.write(b'{"step": 3, "torn')
                raise FULL
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_file)


def raise_full() -> None:
    raise FULL


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("config.json", 0),
        ("journal.jsonl", 4),
        ("metrics.jsonl", 2),
        ("a file", 0),
    ],
)
def test_a_full_disk_ends_with_one_sentence_and_the_run_resumes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    after: int,
):
    whole = Session(make_config(tmp_path / "whole", **STEPS), Disk())
    assert whole.run() == 0
    config, disk = make_config(tmp_path / "full", **STEPS), Disk()
    capsys.readouterr()
    session = Session(config, disk)
    if name == "a file":  # of a checkpoint
        session.script.on["learner.save 2"] = raise_full
    fill(monkeypatch, name, after)
    assert exit_status(session.run) == 1
    monkeypatch.undo()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"{name} cannot be written: No space left on device" in sentence
    assert "give the same command again" in sentence
    again = Session(config, disk)
    assert exit_status(again.run) == 0
    assert left_behind(again.folder) == left_behind(whole.folder)
    assert list(again.folder.path.rglob("*.tmp")) == []
