"""Locked folders: lifetime, and deletion after their process has ended."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.contracts.folder_lock import LockedFolder

HOLD = """
import sys
from pathlib import Path
from pipeline.contracts.folder_lock import LockedFolder
held = LockedFolder(Path(sys.argv[1]), prefix="own-")
(held.path / "file").write_text("mine")
print(held.path, flush=True)
sys.stdin.read()
"""


def holding(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_one_of_a_living_process_stays_one_of_a_killed_process_goes(tmp_path: Path):
    process, theirs = holding(tmp_path)
    with process:
        own = LockedFolder(tmp_path, prefix="own-")
        assert (theirs / "file").read_text() == "mine"
        process.send_signal(signal.SIGKILL)
        process.wait()
        another = LockedFolder(tmp_path, prefix="own-")
        assert not theirs.exists()
        assert own.path.is_dir()
        assert another.path != own.path


def test_what_was_not_held_or_has_another_name_stays(tmp_path: Path):
    others = {"own-being-made", "own-run", "other"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "own-run" / ".lock").touch()  # as a run folder, or an environment, has it
    left = LockedFolder(tmp_path / "other", prefix="")
    os.close(left._lock)  # as the kernel does
    (tmp_path / "own-file").touch()
    LockedFolder(tmp_path, prefix="own-").remove()
    assert {path.name for path in tmp_path.iterdir()} == {*others, "own-file"}
    assert left.path.is_dir()


def test_what_could_not_be_deleted_is_when_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = LockedFolder(tmp_path, prefix="own-")
    (left.path / "sockets").mkdir()
    (left.path / "sockets" / "one").touch()
    os.close(left._lock)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        LockedFolder(tmp_path, prefix="own-")
    assert left.path.is_dir()
    LockedFolder(tmp_path, prefix="own-")
    assert not left.path.exists()


def test_where_nothing_can_be_locked_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks"):
        LockedFolder(tmp_path, prefix="own-")
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_when_it_is_removed(tmp_path: Path):
    held = LockedFolder(tmp_path, prefix="")
    (held.path / "file").touch()
    held.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        LockedFolder(tmp_path / "absent", prefix="own-")
