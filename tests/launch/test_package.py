"""The installed project: its one command, its files, and its place on Python's path."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.source import PACKAGES

PROJECT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with modules that have the names of the project's packages."""
    for name in ("rewards", "configs"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user')\n")
    (tmp_path / "mine.py").write_text("WHERE = __file__\n")
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder outside the project, as if the project were installed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GEMMA_GRPO_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_command_runs_the_others_and_names_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert SETTINGS["project"]["scripts"] == {"gemma-grpo": "launch.__main__:main"}
    for words, told in (
        (["train", "gone.toml"], "gone.toml: no such file"),
        (["trian", "gone.toml"], "command line: trian: unknown; did you mean train?\n"),
        ([], "usage: gemma-grpo COMMAND"),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(told)


def test_an_older_python_is_refused_in_one_sentence(folder: Path) -> None:
    old = "import sys; sys.version_info = (3, 10); import launch.train"
    refused = python(folder, "-c", old)
    assert refused.stderr.startswith("gemma-grpo needs Python 3.11 or later, and ")
    assert refused.stderr.count("\n") == refused.returncode == 1


def test_all_files_of_the_packages_are_installed() -> None:
    patterns = [
        f"{package}/{pattern}"
        for package, named in SETTINGS["tool"]["setuptools"]["package-data"].items()
        for pattern in named
    ]
    left = {
        name
        for package in PACKAGES
        for path in (PROJECT / package).rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
        if not any(fnmatch(name := str(path.relative_to(PROJECT)), one) for one in patterns)
    }
    # What makes environments, and the notebook that calls it.
    notebook = "launch/notebooks/gemma_grpo.ipynb"
    assert left == {notebook, "launch/bootstrap.sh", "launch/make_venv.sh"}


def test_a_users_modules_do_not_hide_the_projects(folder: Path) -> None:
    done = python(folder, "-m", "launch", "plan", str(PROJECT / "configs/demo.toml"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("plan of demo")
    for package in ("launch", "actors"):  # the user's folder is the last on the path
        code = f"import {package}, configs, rewards, mine, sys; print(rewards.__file__, mine.WHERE)"
        done = python(folder, "-c", f"{code}; assert sys.path.count({str(folder)!r}) == 1")
        assert done.stdout.split() == [f"{PROJECT}/rewards/__init__.py", f"{folder}/mine.py"]
