"""`launch.export`: refused requests, checkpoints, examples, messages, no files left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from actors.groups import ExportActors
from configs.load import config_to_json, load_config
from launch import export
from launch.export import prepare, working_config
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.run.run_folder import RunFolder
from pipeline.types import ExportReport
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
    config = working_config(found)  # takes one device
    assert (config.plan.learner_devices, config.plan.placement) == (1, "colocated")
    assert config.lora.start == str(run_dir / "checkpoints" / "3")
    (run_dir / "rollouts" / "test_after.jsonl").unlink()
    with pytest.raises(ValueError, match="--no-verify exports without the comparison"):
        prepare(["moved", *command])


def make(folder: str) -> None:
    Path(folder).mkdir()
    Path(folder, "model.safetensors").write_bytes(b"merged")


class FakeExporter:
    """Writes small files; raises the errors of `wrong`, by method name. Its own actors."""

    def __init__(self, wrong: dict[str, Exception]) -> None:
        self.wrong, self.devices, self.killed, self.exporter = wrong, object(), False, self

    async def start(self) -> str:
        self._maybe("start")
        return "step 3 of a run"

    async def export(self, folder: str, formats: Sequence[str]) -> ExportReport:
        assert formats == ("hf", "peft")
        make(f"{folder}.tmp")
        self._maybe("export")
        os.rename(f"{folder}.tmp", folder)  # noqa: PTH104  # of an async function
        return ExportReport(folder, 1e-6, 7, 3)

    def kill(self) -> None:
        self.killed = True

    def _maybe(self, call: str) -> None:
        if call in self.wrong:
            raise self.wrong[call]


def use_exporter(fake: FakeExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the command export with `fake`, without a cluster."""

    @contextmanager
    def no_cluster(*_: Any, **__: Any) -> Iterator[None]:
        yield

    async def no_wait(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr("launch.cluster.cluster", no_cluster)
    monkeypatch.setattr("launch.cluster.wait_for_devices", no_wait)
    monkeypatch.setattr(ExportActors, "spawn", lambda *_, **__: fake)


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        ({}, 0, "hf, peft: written and loaded back: log-probs of 7 tokens differ by 1.0e-06"),
        ({"start": ValueError("lora.start: is damaged")}, 2, "is damaged"),
        ({"export": RuntimeError("scores tokens differently")}, 1, "scores tokens differently"),
    ],
)
def test_errors_are_printed_and_nothing_is_left_behind(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, Exception],
    status: int,
    message: str,
):
    fake = FakeExporter(wrong)
    use_exporter(fake, monkeypatch)
    assert export.main([str(run_dir), "--out", "out"]) == status
    out, err = capsys.readouterr()
    assert message in (err if status else out)
    assert fake.killed
    assert (run_dir.parent / "out").exists() == (status == 0)
    assert not (run_dir.parent / "out.tmp").exists()


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
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hub, out = Hub(), run_dir.parent / "out"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    use_exporter(FakeExporter({}), monkeypatch)

    def told(status: int, login: Exception | None, upload: Exception | None = None) -> str:
        hub.login, hub.upload = login, upload
        command = ["moved", "--out", "out", "--push", "hf://ann/tuned"]
        assert export.main(command) == status
        shown = capsys.readouterr()
        return shown.err if status else shown.out

    assert "there is no login; log in with" in told(2, LocalTokenNotFoundError())
    assert "the hub cannot be reached, or refuses" in told(1, httpx.ConnectError("nobody answers"))
    assert not out.exists()
    broken = told(1, None, httpx.ConnectError("the connection broke"))
    assert f"{out} is complete; push it with: hf upload ann/tuned {out}" in broken
    shutil.rmtree(out)
    assert "pushed: https://hub/ann/tuned" in told(0, None)
    (given,) = hub.pushed
    assert (given["folder_path"], given["commit_message"]) == (out, "moved, checkpoint 3")
    assert "adapter/*" in given["delete_patterns"]  # of an earlier export
