"""`make test` fails if a check fails, and shows all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Prints its arguments, and fails in `python -m MODULE` while the file `broken-MODULE` exists.
FAKE_PYTHON = '#!/bin/sh\necho "$@"\n! [ -e "broken-$2" ]\n'


@pytest.mark.parametrize("broken", ["nothing", "ruff", "mypy", "pytest"])
def test_make_test_fails_if_a_check_fails_and_shows_all(tmp_path: Path, broken: str) -> None:
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "lint-imports"):
        (programs / name).write_text(FAKE_PYTHON, encoding="utf-8")
        (programs / name).chmod(0o755)
    (tmp_path / f"broken-{broken}").touch()
    # Without the variables of a `make` that runs these tests.
    ours = {"ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    done = subprocess.run(
        ["make", "--old-file", ".venv/.dev", "test", "ARGS=tests/configs -k toml"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key not in ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if broken == "nothing" else 2)
    lines = done.stdout.splitlines()
    assert "-m ruff check ." in lines
    # Tests and types run beside each other; both are shown.
    both = {"-m pytest -n 2 --dist worksteal tests/configs -k toml", "-m mypy"}
    assert both <= set(lines) or broken == "ruff"
