"""Locked folders: lifetime, and deletion after their process has ended."""

from __future__ import annotations

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


def test_only_folders_of_ended_processes_are_deleted(tmp_path: Path):
    others = {"own-being-made", "own-run", "other"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "own-run" / ".lock").touch()  # like a run folder or an environment
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        own = LockedFolder(tmp_path, prefix="own-")
        assert (theirs / "file").read_text() == "mine"
        process.kill()
        process.wait()
    another = LockedFolder(tmp_path, prefix="own-")
    assert not theirs.exists()
    assert own.path.is_dir()
    own.remove()
    another.remove()
    assert {path.name for path in tmp_path.iterdir()} == others
