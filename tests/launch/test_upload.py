"""The configuration of a submitted job, and refused submissions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from launch import upload
from tests.launch.cluster_fixtures import CONFIG, PATIENCE_S, PROJECT, private_environment


def test_the_configuration_of_a_job_has_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path
    monkeypatch.chdir(folder)
    for name in ("settings", "upload"):
        (folder / name).mkdir()
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


def test_a_reward_module_of_the_current_folder_is_refused(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def good(completion): return 0.0\n")
    text = CONFIG.format(name="mine", runs="runs")
    (tmp_path / "my.toml").write_text(text.replace("rewards.correctness:exact_answer", "mine:good"))
    environment = private_environment() | {"GEMMA_GRPO_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", f"{PROJECT}/launch/submit.sh", "my.toml"],
        cwd=tmp_path,
        env=environment | {"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no module 'mine'" in done.stderr
    assert "name a file of yours by its path" in done.stderr


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
