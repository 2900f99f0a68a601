"""What `make` maintains and runs: the environment, made and filled once, and the checks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Answers the probe of make_venv.sh, and makes an environment whose python logs and prints its
# arguments and fails in `python -m MODULE` while the file `broken-MODULE` exists.
FAKE_PYTHON = """#!/bin/sh
if [ "$1" = -I ]; then
    echo "$0"
elif [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\necho "$@" | tee -a log\\n! [ -e "broken-$2" ]\\n' >"$3/bin/python"
    printf '#!/bin/sh\\n' >"$3/bin/lint-imports"
    chmod +x "$3/bin/python" "$3/bin/lint-imports"
    echo "made with ${0##*/}" >>log
fi
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    for name in ("Makefile", "launch/make_venv.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    requirements = ("requirements.txt", "requirements-dev.txt", "requirements-tpu.txt")
    for name in ("pyproject.toml", *requirements):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text(FAKE_PYTHON, encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[int, str]:
    """Runs make; returns its status and output."""
    # Without the variables of a `make` that runs these tests.
    ours = {"ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "SEED"}
    outer = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(
        ["make", *arguments],
        cwd=project,
        env=outer | {"PYTHON": str(project / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("broken", ["nothing", "ruff", "pytest"])
def test_make_test_fails_if_a_check_fails_and_shows_all(project: Path, broken: str) -> None:
    (project / f"broken-{broken}").touch()
    status, shown = run(project, "test", "ARGS=tests/configs -k toml")
    assert status == (0 if broken == "nothing" else 2)
    lines = shown.splitlines()
    assert "-m ruff check ." in lines
    # Tests and types run beside each other; both are shown.
    both = {"-m pytest -n 2 --dist worksteal tests/configs -k toml", "-m mypy"}
    assert both <= set(lines) or broken == "ruff"
