"""The scripts that find a Python and make the environment, with fake interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIND = ROOT / "launch" / "find_python.sh"
SHIM = "#!/bin/sh\necho 'pyenv: version not installed' >&2\nexit 127\n"
RUNS = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def find(*folders: Path, python: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.pathsep.join([*map(str, folders), str(ROOT / "no-such-folder")])}
    if python is not None:
        environment["PYTHON"] = python
    # By its full path: the PATH under test has no shell.
    return subprocess.run(
        ["/bin/sh", FIND], env=environment, capture_output=True, text=True, check=False
    )


def base_interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def old(version: str) -> str:
    """A fake interpreter that answers the probe as a real one of that version would."""
    return f"#!/bin/sh\necho 'is Python {version}'\nexit 1\n"


def test_a_failing_shim_is_skipped(tmp_path: Path) -> None:
    program(tmp_path, "python3.12", SHIM)
    program(tmp_path, "python3", RUNS)
    result = find(tmp_path)
    assert result.returncode == 0
    assert result.stdout == f"{base_interpreter()}\n"


def test_without_a_working_python_the_error_names_the_tried_ones(tmp_path: Path) -> None:
    shim = program(tmp_path, "python3.12", SHIM)
    older = program(tmp_path, "python3", old("3.10"))
    (tmp_path / "python").mkdir()
    result = find(tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[1:5] == [
        f"  {shim}: does not run",
        "  python3.11: not on PATH",
        f"  {older}: is Python 3.10",
        "  python: not on PATH",
    ]
    assert "PYTHON=/path/to/python3.12" in result.stderr


def test_a_requested_python_is_never_replaced(tmp_path: Path) -> None:
    program(tmp_path, "python3", RUNS)
    wanted = program(tmp_path, "mine", old("3.13"))
    result = find(tmp_path, python=str(wanted))
    assert result.returncode == 1
    assert f"{wanted}: is Python 3.13" in result.stderr
    assert "python3:" not in result.stderr
