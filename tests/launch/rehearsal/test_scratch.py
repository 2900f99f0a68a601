"""The temporary folder of a rehearsal: its place, its deletion, and that runs are untouched."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.rehearsal.scratch import rehearsal_config, temporary_run_folder
from pipeline.run.run_folder import RunFolder
from tests.fakes import make_config
from tests.launch.small_run import everything_below


def fill(folder: Path) -> None:
    (folder / "export.tmp").mkdir()
    (folder / "export.tmp" / "model.safetensors").write_bytes(b"half")
    (folder / "plan.json").write_text("{}")


def test_the_folder_is_beside_the_runs_and_deleted_afterwards(tmp_path: Path):
    config = make_config(tmp_path / "runs" / "of" / "mine")
    with temporary_run_folder(rehearsal_config(config)) as folder:
        assert folder == tmp_path / "runs" / "of" / "mine" / ".rehearsal-run"
        fill(folder)
    assert everything_below(tmp_path) == set()


@pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_folder_is_deleted_after_a_failure_or_a_signal(
    tmp_path: Path, how: type[BaseException]
):
    def end() -> None:
        with temporary_run_folder(rehearsal_config(make_config(tmp_path))) as folder:
            fill(folder)
            raise how

    with pytest.raises(how):
        end()
    assert everything_below(tmp_path) == set()


def test_a_running_run_of_that_name_is_not_touched(tmp_path: Path):
    config = make_config(tmp_path)
    run = RunFolder.of(config)
    run.create(config)
    run.journal("started")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with temporary_run_folder(rehearsal_config(config)) as folder:
        fill(folder)
    run.close()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_leftovers_of_a_killed_rehearsal_are_deleted(tmp_path: Path):
    config = rehearsal_config(make_config(tmp_path))
    left = RunFolder.of(config).path
    left.mkdir()
    (left / ".lock").touch()
    fill(left)
    with temporary_run_folder(config) as folder:
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert everything_below(tmp_path) == set()


def test_two_rehearsals_at_once_are_refused(tmp_path: Path):
    config = rehearsal_config(make_config(tmp_path))
    with temporary_run_folder(config) as folder:
        fill(folder)
        with (
            pytest.raises(ValueError, match="another process is using"),
            temporary_run_folder(config),
        ):
            pass
        assert (folder / "plan.json").is_file()


def test_nothing_is_logged_to_weights_and_biases(tmp_path: Path):
    config = make_config(tmp_path, wandb={"mode": "offline", "project": "mine"})
    assert rehearsal_config(config).wandb.mode == "disabled"
