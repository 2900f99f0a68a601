"""Locked folders: lifetime, and deletion after their process has ended."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.run.folder_lock import LockedFolder


def test_only_folders_of_ended_processes_are_deleted(tmp_path: Path):
    others = {"own-being-made", "own-run", "other"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "own-run" / ".lock").touch()  # like a run folder or an environment
    own, theirs = (LockedFolder(tmp_path, prefix="own-") for _ in range(2))
    (theirs.path / "file").write_text("theirs")
    LockedFolder(tmp_path, prefix="own-").remove()
    assert (theirs.path / "file").read_text() == "theirs"
    os.close(theirs._lock)  # the kernel does this when a process ends
    LockedFolder(tmp_path, prefix="own-").remove()
    assert not theirs.path.exists()
    own.remove()
    assert {path.name for path in tmp_path.iterdir()} == others
