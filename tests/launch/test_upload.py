"""The user's modules in a submitted job, and refused submissions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import load_config
from launch import upload
from launch.upload import user_modules
from tests.launch.cluster_fixtures import CONFIG, PATIENCE_S, PROJECT, private_environment

FILES = {
    "my_rewards.py": "import helpers\nfrom pkg.parts import near\nfrom rewards.base import score\n",
    "helpers.py": "import json, os.path\ndef late():\n    import lazy.inner.deep\n",
    "pkg/__init__.py": "from . import constants\n",
    "pkg/constants.py": "from __future__ import annotations\n",
    "pkg/parts.py": "from .deeper.more import one\nfrom .constants import LIMIT\n",
    "pkg/deeper/more.py": "from ... import nowhere\nfrom .. import sibling\n",
    "pkg/sibling.py": "import my_rewards\n",
    "pkg/unused.py": "",
    "lazy/inner/deep.py": "def broken(:\n",
    "unused.py": "",
    "words.txt": "not a module",
    "runs/run/config.py": "",
    ".venv/lib/site-packages/numpy/__init__.py": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def found(folder: Path, *functions: str) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in user_modules(functions, folder))


def test_only_modules_and_their_imports_are_found(folder: Path):
    assert found(folder, "my_rewards:near", "rewards.format:well_formed") == [
        "helpers.py",
        "lazy/inner/deep.py",
        "my_rewards.py",
        "pkg/__init__.py",
        "pkg/constants.py",
        "pkg/deeper/more.py",
        "pkg/parts.py",
        "pkg/sibling.py",
    ]
    assert found(folder, "pkg.constants:one") == ["pkg/__init__.py", "pkg/constants.py"]
    assert found(folder, "unused:f") == ["unused.py"]
    assert found(folder, "rewards.format:well_formed", "numpy:array", "/a/my_rewards.py:f") == []


def test_a_file_with_the_path_of_a_project_file_is_never_uploaded(folder: Path):
    (folder / "rewards").mkdir()
    (folder / "rewards/mine.py").write_text("from rewards.base import Tags\n")
    (folder / "rewards/base.py").write_text("")
    with pytest.raises(ValueError, match=r"mine.py cannot be imported: a package of this project"):
        user_modules(["rewards.mine:f"], folder)


@pytest.mark.parametrize("clash", ["rewards.py", "rewards/__init__.py"])
def test_a_module_named_like_a_project_package_is_refused(folder: Path, clash: str):
    (folder / clash).parent.mkdir(exist_ok=True)
    (folder / clash).write_text("def mine(inputs): ...\n")
    refused = rf"^rewards\.functions: {folder / clash} cannot be imported: a package of this"
    for function in ("rewards:mine", "my_rewards:near"):
        with pytest.raises(ValueError, match=refused):
            user_modules([function], folder)
    # A file that is not imported is no problem.
    assert found(folder, "unused:f") == ["unused.py"]


def test_a_folder_of_settings_may_be_called_configs(folder: Path):
    (folder / "configs").mkdir()
    (folder / "configs/my.toml").write_text("")
    (folder / "lazy/inner/deep.py").write_text("from configs.schema import Config\n")
    assert "lazy/inner/deep.py" in found(folder, "my_rewards:near")


def test_the_projects_own_folder_has_its_packages(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upload, "PROJECT", folder)
    (folder / "rewards").mkdir()
    (folder / "rewards/__init__.py").write_text("")
    (folder / "rewards/brevity.py").write_text("import unused\n")
    files = ["rewards/__init__.py", "rewards/brevity.py", "unused.py"]
    assert found(folder, "rewards.brevity:brief") == files
    (folder / "rewards.py").write_text("")
    with pytest.raises(ValueError, match=r"rewards\.py cannot be imported: a package of this"):
        user_modules(["rewards:mine"], folder)


def test_all_missing_modules_are_reported_at_once(folder: Path):
    with pytest.raises(ValueError, match="no module") as refused:
        user_modules(["gone:f", "my_rewards:near", "lost.inner:f"], folder)
    assert str(refused.value).splitlines() == [
        f"rewards.functions: no module '{name}' in {folder} and none installed; submit from the "
        "folder that has it, or install it where Ray runs"
        for name in ("gone", "lost.inner")
    ]


def test_the_configuration_of_a_job_has_absolute_paths(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    for name in ("settings/demo", "upload"):
        (folder / name).mkdir(parents=True)
    text = CONFIG.format(name="mine", runs="runs").replace(f"{PROJECT}/launch/demo", "demo")
    text = text.replace("rewards.correctness:exact_answer", "own.py:near")
    (folder / "settings/my.toml").write_text(text)
    upload_to = ["upload", "settings/my.toml", "--data.test.path", "test.csv", "--extend", "1h"]
    assert upload.main(upload_to) == 0
    assert capsys.readouterr().out == "mine\n"
    # Moved to another machine's temporary folder, and read with the same arguments.
    monkeypatch.chdir((folder / "upload").rename(folder / "job"))
    monkeypatch.setenv("GEMMA_GRPO_HOME", str(folder))
    config = load_config("submitted", [("data.test.path", "test.csv")])
    assert config.model.path == f"{folder}/settings/demo/tiny_gemma3"
    assert config.data.train.path == f"{folder}/settings/demo/data/train.jsonl"
    assert config.data.test.path == f"{folder}/test.csv"
    assert config.rewards.functions[0].function == f"{folder}/settings/own.py:near"
    assert config.run.dir == f"{folder}/runs"


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
    assert done.stderr.startswith("rewards.functions: no module 'outside' in ")


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        ([], 2, "launch/submit.sh [--no-wait] CONFIG.toml"),
        (["--no-wait"], 2, "launch/submit.sh [--no-wait] CONFIG.toml"),
        (["a.toml", "--help"], 0, "launch/submit.sh [--no-wait] CONFIG.toml"),
        (["a.toml", "--dry-run"], 2, "--dry-run: not possible for a job"),
    ],
)
def test_an_invalid_submission_is_refused_at_once(arguments: list[str], status: int, shown: str):
    script = Path(upload.__file__).with_name("submit.sh")
    done = subprocess.run(
        ["bash", str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert shown in done.stdout + done.stderr
