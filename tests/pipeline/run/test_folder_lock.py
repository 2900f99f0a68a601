"""Locked folders: lifetime, and deletion after their process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.run.folder_lock import LockedFolder

HOLD = """
import sys
from pathlib import Path
from pipeline.run.folder_lock import LockedFolder
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


def test_only_folders_of_killed_processes_are_deleted(tmp_path: Path):
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


def test_unlocked_or_differently_named_folders_are_kept(tmp_path: Path):
    others = {"own-being-made", "own-run", "other"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "own-run" / ".lock").touch()  # like a run folder or an environment
    left = LockedFolder(tmp_path / "other", prefix="")
    os.close(left._lock)  # the kernel does this when a process ends
    (tmp_path / "own-file").touch()
    LockedFolder(tmp_path, prefix="own-").remove()
    assert {path.name for path in tmp_path.iterdir()} == {*others, "own-file"}
    assert left.path.is_dir()
