"""The folder of a rehearsal: where it is, that it is gone, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.rehearsal.scratch import rehearsed, scratch
from pipeline.run.run_folder import RunFolder
from tests.fakes import make_config
from tests.launch.small_run import everything_below


def fill(folder: Path) -> None:
    (folder / "export.tmp").mkdir()
    (folder / "export.tmp" / "model.safetensors").write_bytes(b"half")
    (folder / "plan.json").write_text("{}")


def test_it_is_beside_the_runs_and_nothing_of_it_is_left(tmp_path: Path):
    config = make_config(tmp_path / "runs" / "of" / "mine")
    with scratch(rehearsed(config)) as folder:
        assert folder == tmp_path / "runs" / "of" / "mine" / ".rehearsal-run"
        fill(folder)
    assert everything_below(tmp_path) == set()


@pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_a_failure_or_a_signal_either(
    tmp_path: Path, how: type[BaseException]
):
    def end() -> None:
        with scratch(rehearsed(make_config(tmp_path))) as folder:
            fill(folder)
            raise how

    with pytest.raises(how):
        end()
    assert everything_below(tmp_path) == set()


def test_a_run_of_that_name_is_not_touched_even_while_it_goes_on(tmp_path: Path):
    config = make_config(tmp_path)
    run = RunFolder.of(config)
    run.create(config)
    run.journal("started")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with scratch(rehearsed(config)) as folder:
        fill(folder)
    run.close()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_a_killed_rehearsal_left_is_deleted(tmp_path: Path):
    config = rehearsed(make_config(tmp_path))
    left = RunFolder.of(config).path
    left.mkdir()
    (left / ".lock").touch()
    fill(left)
    with scratch(config) as folder:
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert everything_below(tmp_path) == set()


def test_two_at_once_do_not_share_it(tmp_path: Path):
    config = rehearsed(make_config(tmp_path))
    with scratch(config) as folder:
        fill(folder)
        with pytest.raises(ValueError, match="another process is using"), scratch(config):
            pass
        assert (folder / "plan.json").is_file()


def test_weights_and_biases_is_told_nothing(tmp_path: Path):
    config = make_config(tmp_path, wandb={"mode": "offline", "project": "mine"})
    assert rehearsed(config).wandb.mode == "disabled"
