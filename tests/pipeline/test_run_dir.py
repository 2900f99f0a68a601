"""The run folder: what may be done in it, by whom, and what survives a kill."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from configs.load import config_to_json
from configs.schema import Config
from pipeline.run_dir import RunFolder, write_atomically
from tests.fakes import make_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


@pytest.fixture
def folder(config: Config) -> Iterator[RunFolder]:
    opened = RunFolder.of(config)
    opened.create(config)
    yield opened
    opened.close()


def test_the_folder_is_dir_and_name(tmp_path: Path, config: Config):
    assert RunFolder.of(config).path == tmp_path / "run"


READ_ONLY = pytest.mark.skipif(
    not Path("/sys/kernel").is_dir(), reason="needs a file system that also refuses root"
)


@READ_ONLY
def test_a_folder_that_cannot_be_made_is_found_by_trying():
    looked = RunFolder(Path("/sys/kernel/runs/mine"))
    with pytest.raises(
        ValueError,
        match=r'^run\.dir = "/sys/kernel/runs": /sys/kernel cannot be written: .*; choose another$',
    ):
        looked.check_writable()


def test_a_folder_with_other_permissions_is_found_too(tmp_path: Path):
    closed = tmp_path / "closed"
    (closed / "run").mkdir(parents=True)
    for path in (closed / "run", closed):
        path.chmod(0o555)
    if os.access(closed, os.W_OK):
        pytest.skip("root may write there")
    for name in ("run", "new"):
        with pytest.raises(ValueError, match=rf'^run\.dir = "{closed}": .* cannot be written'):
            RunFolder(closed / name).check_writable()


def test_looking_leaves_no_trace(tmp_path: Path, config: Config):
    looked = RunFolder.of(config)
    looked.check(config)
    looked.check_writable()
    assert looked.summary is None
    assert looked.metrics == []
    assert list(looked.events("started")) == []
    assert looked.read_rollouts("test_before") is None
    assert list(tmp_path.iterdir()) == []


def test_the_resolved_configuration_is_kept(folder: RunFolder, config: Config):
    kept = (folder.path / "config.json").read_text(encoding="utf-8")
    assert kept == config_to_json(config)
    assert folder.rollouts.is_dir()


def test_the_same_run_goes_on_and_may_be_longer(tmp_path: Path, folder: RunFolder, config: Config):
    folder.close()
    RunFolder.of(config).check(config)
    longer = make_config(tmp_path, budget={"steps": 99})
    RunFolder.of(longer).check(longer)


def test_altered_settings_are_refused_with_old_and_new_value(tmp_path: Path, folder: RunFolder):
    folder.close()
    other = make_config(
        tmp_path,
        learner={"lr": 1e-3, "schedule": "linear"},
        prompt={"system": 'Say "why".'},
        plan={"samplers": 2},
    )
    with pytest.raises(ValueError, match="holds a run with other settings") as caught:
        RunFolder.of(other).check(other)
    assert str(caught.value).splitlines()[1:] == [
        '  prompt.system: was "", is "Say \\"why\\"."',
        "  learner.lr: was 1e-05, is 0.001",
        '  learner.schedule: was "constant", is "linear"',
        "  learner.decay_steps: was none, is 3",
        "  plan.samplers: was none, is 2",
    ]


def test_a_folder_of_something_else_is_refused(tmp_path: Path, config: Config):
    (tmp_path / "run").mkdir()
    RunFolder.of(config).check(config)
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not empty and not a run; choose another run"):
        RunFolder.of(config).check(config)


@pytest.mark.parametrize("under", ["", "deep/er"])
def test_a_file_in_the_place_of_folders_is_refused(tmp_path: Path, under: str):
    file = tmp_path / "README.md"
    file.touch()
    config = make_config(file / under)
    told = f'run.dir = "{file / under}": {file} is a file; choose another'
    for attempt in (RunFolder.of(config).check, RunFolder.of(config).create):
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            attempt(config)
    named = make_config(tmp_path, run={"name": "README.md"})
    told = f'run.name = "README.md": {file} is a file; choose another'
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"), RunFolder.of(named).held():
        pass


def test_two_processes_do_not_work_in_one_folder(folder: RunFolder, config: Config):
    other = RunFolder.of(config)
    for attempt in (other.check, other.create):
        with pytest.raises(ValueError, match=f"another process is at work in {folder.path}"):
            attempt(config)
    folder.close()
    other.check(config)
    other.create(config)
    other.close()


def test_a_held_folder_keeps_others_out_and_leaves_nothing_if_nothing_began(tmp_path: Path):
    path = tmp_path / "runs" / "deep" / "run"
    config = make_config(path.parent, run={"name": "run"})
    mine, other = RunFolder(path), RunFolder(path)
    with mine.held():
        for attempt in (other.check, other.create):
            with pytest.raises(ValueError, match="another process is at work"):
                attempt(config)
    assert list(tmp_path.iterdir()) == []
    with mine.held():
        mine.create(config)
    assert (path / "config.json").is_file()
    with other.held():
        pass
    assert (path / "config.json").is_file()


def test_folders_above_that_another_run_needs_by_now_stay(tmp_path: Path):
    first, second = (RunFolder(tmp_path / "runs" / name) for name in ("first", "second"))
    with ExitStack() as other:
        with first.held():
            other.enter_context(second.held())
        assert not first.path.exists()
        assert second.path.is_dir()
    assert not second.path.exists()


def test_a_kill_between_lock_and_configuration_leaves_a_folder_that_can_be_used(
    tmp_path: Path, config: Config
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    RunFolder.of(config).check(config)


def test_events_of_a_kind_in_their_order(folder: RunFolder):
    folder.journal("checkpoint", step=1)
    folder.journal("fault", what="x")
    folder.journal("checkpoint", step=2)
    assert [entry["step"] for entry in folder.events("checkpoint")] == [1, 2]
    (fault,) = folder.events("fault")
    assert fault == {"time": fault["time"], "event": "fault", "what": "x"}


@pytest.mark.parametrize("torn", ['{"event": "x", "st', '{"event": "x"', "{"])
def test_half_a_line_does_not_swallow_the_next_one(folder: RunFolder, torn: str):
    folder.journal("one", step=1)
    path = folder.path / "journal.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + torn, encoding="utf-8")
    folder.journal("two", step=2)
    folder.journal("two", step=3)
    assert [entry["step"] for entry in folder.events("one")] == [1]
    assert [entry["step"] for entry in folder.events("two")] == [2, 3]


STRANGE = 'a\u2028b\u2029c\x85d\x0be\x1cf\r\ng \N{GRINNING FACE} \\ " \x00'


def test_any_text_survives(folder: RunFolder):
    rows = [{"text": STRANGE}, {"text": ""}, {"text": STRANGE * 2}]
    folder.write_rollouts("test_before", rows)
    assert folder.read_rollouts("test_before") == rows
    folder.journal("said", text=STRANGE)
    assert [entry["text"] for entry in folder.events("said")] == [STRANGE]


def test_metrics_are_appended_and_rollouts_and_summary_replaced(folder: RunFolder):
    for step in (1, 2):
        folder.write_metrics({"step": step, "loss": 1 / step})
        folder.write_rollouts("step_000001", [{"sample": step}])
        folder.write_summary({"steps": step})
    assert folder.metrics == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    assert folder.read_rollouts("step_000001") == [{"sample": 2}]
    assert folder.summary == {"steps": 2}
    assert json.loads((folder.path / "summary.json").read_text(encoding="utf-8")) == {"steps": 2}


def test_a_rewind_forgets_what_will_be_done_again_and_nothing_else(folder: RunFolder):
    for step in range(1, 5):
        folder.write_metrics({"step": step})
        folder.write_rollouts(f"step_{step:06d}", [])
    for name in ("validation_000002", "validation_000004", "test_before"):
        folder.write_rollouts(name, [])
    folder.write_summary({"ended": "interrupted", "steps": 4})
    folder.journal("checkpoint", step=2)
    folder.rewind(2)
    assert folder.metrics == [{"step": 1}, {"step": 2}]
    assert sorted(path.stem for path in folder.rollouts.iterdir()) == [
        "step_000001",
        "step_000002",
        "test_before",
        "validation_000002",
    ]
    assert folder.summary is None
    assert len(list(folder.events("checkpoint"))) == 1


def test_a_finished_run_that_goes_on_has_its_summary_in_the_journal(folder: RunFolder):
    for ended in ("interrupted", "finished"):
        folder.write_summary({"ended": ended, "steps": 4})
        folder.rewind(4)
        assert folder.summary is None
    (entry,) = folder.events("reopened")
    assert entry["summary"] == {"ended": "finished", "steps": 4}


def test_a_rewind_of_an_empty_run(folder: RunFolder):
    folder.rewind(0)
    assert folder.metrics == []


def test_a_write_that_fails_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"


def test_the_plan_in_force_is_replaced(tmp_path: Path):
    config = make_config(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    seen = [folder.plan]
    for rows in (8, 6):
        folder.write_plan({"in_force": {"rollout_rows": rows}})
        seen.append(folder.plan)
    assert seen == [None, *({"in_force": {"rollout_rows": rows}} for rows in (8, 6))]
    folder.close()
