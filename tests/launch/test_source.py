"""The user's modules and files of reward functions in a submitted job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import source
from launch.source import copy_user_files
from rewards.resolve import uploaded
from tests.launch.cluster_fixtures import CONFIG, PATIENCE_S, PROJECT, private_environment

FILES = {
    "my_rewards.py": "import helpers\nfrom rewards.base import score\n",
    "helpers.py": "def late():\n    import lazy.inner.deep\n",
    "lazy/inner/deep.py": "def broken(:\n",
    "words.txt": "not a module",
    "rewards.py": "",  # never imported: the project has a package of this name
    "rewards/mine.py": "",
    ".venv/lib/site-packages/numpy/__init__.py": "",
    "env/pyvenv.cfg": "",
    "env/lib/numpy/__init__.py": "",
    "other/own.py": "import near_it, helpers\n",
    "other/parts/one.py": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def copies(folder: Path, *functions: str) -> set[str]:
    root = folder / ".upload"
    shutil.rmtree(root, ignore_errors=True)
    copy_user_files(functions, folder, root)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


HERE = {"helpers.py", "lazy/inner/deep.py", "my_rewards.py", "other/own.py", "other/parts/one.py"}


def test_the_python_files_of_a_user_are_uploaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert copies(folder, "rewards.format:well_formed") == set()
    assert copies(folder, "my_rewards:near", "rewards.format:well_formed") == HERE
    # Those beside a reward file travel to their own folder.
    functions = [f"{folder}/other/own.py:f", f"{folder}/other/own.py:g", "/gone/gone.py:f"]
    own = uploaded(folder / "other", Path())
    assert copies(folder, *functions) == HERE | {f"{own}/own.py", f"{own}/parts/one.py"}
    monkeypatch.setattr(source, "_MOST_FILES", 4)
    with pytest.raises(ValueError, match="more than 4 Python files"):
        copies(folder, "my_rewards:near")


Submit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def submit(folder: Path) -> Submit:
    """Submits a configuration in the user's folder without a cluster."""
    text = CONFIG.format(name="mine", runs="runs")

    def run(function: str) -> subprocess.CompletedProcess[str]:
        (folder / "my.toml").write_text(text.replace("rewards.correctness:exact_answer", function))
        environment = private_environment() | {"GEMMA_GRPO_PYTHON": sys.executable}
        environment |= {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1", "WANDB_MODE": "disabled"}
        return subprocess.run(
            ["bash", f"{PROJECT}/launch/submit.sh", "my.toml"],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(folder / "elsewhere")},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return run


@pytest.mark.slow
def test_the_check_runs_with_the_files_of_the_job(folder: Path, submit: Submit):
    (folder / "mine.py").write_text(
        "from helpers import late\ndef good(inputs): return [0.0 for _ in inputs]\n"
    )
    done = submit("mine:good")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no Ray cluster answers at http://127.0.0.1:1" in done.stderr
    # Data beside a module is not uploaded; a path that is relative to it leads into the upload.
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "WORDS = (Path(__file__).parent / 'words.txt').read_text()\n"
        "def good(inputs): return [0.0 for _ in inputs]\n"
    )
    done = submit("mine:good")
    assert (done.returncode, done.stdout) == (2, "")
    assert "mine:good: importing mine raises FileNotFoundError" in done.stderr
    assert "words.txt" in done.stderr
    # The job does not have the Python path of this shell.
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/outside.py").write_text("def good(inputs): return [0.0 for _ in inputs]\n")
    done = submit("outside:good")
    assert (done.returncode, done.stdout) == (2, "")
    assert "outside:good: " in done.stderr
