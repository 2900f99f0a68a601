"""`launch.export`: refused requests, checkpoints, examples, messages, no files left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from configs.load import config_to_json, load_config
from launch import export
from launch.exits import Failure
from launch.export import prepare, working_config
from launch.push import check_push, push
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.run.run_folder import RunFolder
from tests.launch.small_run import everything_below, write_checkpoint


@pytest.fixture
def run_dir(request_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has been moved, with two checkpoints and rollouts."""
    monkeypatch.setattr("launch.preparation.open_model_files", lambda _: read_tokenizer(tokenizer))
    config, folder = load_config(request_path), request_path.parent / "moved"
    for step in (2, 3):
        write_checkpoint(folder, step)
    (folder / "config.json").write_text(config_to_json(config), encoding="utf-8")
    (folder / "rollouts").mkdir()
    RunFolder(folder).write_rollouts("test_after", [{"text": "tom has 3 apples."}])
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "--out", "x"], "command line: no folder"),
        (["moved", "--out", "full"], "--out full: exists and is not an empty folder"),
        (["moved", "--out", "x", "--public"], "--public has no effect without --push"),
        (["moved", "--out", "x", "--push", "ann/x"], "--push ann/x: write hf://USER/NAME"),
        (
            ["moved", "--out", "x", "--push", "hf://ann/x", "--no-verify"],
            "--push uploads verified exports; leave out --no-verify",
        ),
    ],
)
def test_mistakes_give_one_line_and_leave_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    (run_dir.parent / "full" / "x").mkdir(parents=True)
    before = everything_below(run_dir.parent)
    assert export.main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert everything_below(run_dir.parent) == before


def test_a_moved_run_is_read_from_its_new_folder(run_dir: Path):
    command = ["--out", "out", "--format", "peft", "hf"]
    found = prepare(["moved", *command])
    assert RunFolder.of(found.config).path == run_dir
    assert found.adapter == run_dir / "checkpoints" / "3"
    assert found.formats == ("hf", "peft")
    assert len(found.examples) == 1
    assert prepare(["moved", *command, "--no-verify"]).examples == ()
    assert prepare(["moved@2", *command]).adapter.name == "2"
    assert working_config(found).lora.start == str(run_dir / "checkpoints" / "3")
    (run_dir / "rollouts" / "test_after.jsonl").unlink()
    with pytest.raises(ValueError, match="--no-verify exports without the comparison"):
        prepare(["moved", *command])


class Hub:
    """Answers as `HfApi` does; the errors are those of `whoami` and of `upload_folder`."""

    endpoint = "https://hub"

    def __init__(self) -> None:
        self.login: Exception | None = None
        self.upload: Exception | None = None
        self.pushed: list[dict[str, Any]] = []

    def whoami(self) -> None:
        if self.login is not None:
            raise self.login

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert (name, private, exist_ok) == ("ann/tuned", True, True)

    def upload_folder(self, **given: Any) -> None:
        if self.upload is not None:
            raise self.upload
        self.pushed.append(given)


def test_an_export_is_pushed_or_stays_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    assert check_push("hf://ann/tuned") == "ann/tuned"
    for hub.login, told in (
        (LocalTokenNotFoundError(), "there is no login; log in with"),
        (httpx.ConnectError("nobody answers"), "the hub cannot be reached, or refuses"),
    ):
        with pytest.raises((ValueError, Failure), match=told):
            check_push("hf://ann/tuned")
    hub.upload = httpx.ConnectError("the connection broke")
    with pytest.raises(Failure, match="is complete; push it with: hf upload ann/tuned /"):
        push(tmp_path, "ann/tuned", private=True, title="demo")
    hub.upload = None
    push(tmp_path, "ann/tuned", private=True, title="demo")
    assert capsys.readouterr().out.endswith("pushed: https://hub/ann/tuned\n")
    (given,) = hub.pushed
    assert (given["folder_path"], given["commit_message"]) == (tmp_path, "demo")
    assert "adapter/*" in given["delete_patterns"]  # of an earlier export
