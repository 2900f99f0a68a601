"""The run folder: refusals, locking, and records that survive a kill."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from configs.schema import Config
from pipeline.run.record_files import (
    DamagedFileError,
    read_rows,
    replace_folder,
)
from pipeline.run.run_folder import RunFolder
from tests.samples import make_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


@pytest.fixture
def folder(config: Config) -> Iterator[RunFolder]:
    opened = RunFolder.of(config)
    opened.create(config)
    yield opened
    opened.close()


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_promise_6_a_start_finds_an_export_after_an_interrupted_replacement(
    folder: RunFolder, config: Config, monkeypatch: pytest.MonkeyPatch, renames: int
):
    fresh, rename = folder.path / "export.tmp", Path.rename
    for each in (folder.export, fresh):
        each.mkdir()
        (each / "name").write_text(each.name, encoding="utf-8")

    left = iter(range(renames))

    def die(path: Path, target: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        patched.setattr("shutil.rmtree", lambda *_, **__: None)
        with contextlib.suppress(KeyboardInterrupt):
            replace_folder(folder.export, fresh)
    folder.create(config)
    content = (folder.export / "name").read_text(encoding="utf-8")
    assert content == ("export.tmp" if renames == 2 else "export")
    if renames < 2:
        replace_folder(folder.export, fresh)
    assert (folder.export / "name").read_text(encoding="utf-8") == "export.tmp"
    assert not [*folder.path.glob("export.*"), *folder.path.glob(".export*")]


READ_ONLY = pytest.mark.skipif(
    not Path("/sys/kernel").is_dir(), reason="needs a file system that also refuses root"
)


@READ_ONLY
def test_an_unwritable_folder_is_detected_by_writing():
    looked = RunFolder(Path("/sys/kernel/runs/mine"))
    with pytest.raises(
        ValueError,
        match=r'^run\.dir = "/sys/kernel/runs": /sys/kernel cannot be written: .*; choose another$',
    ):
        looked.check_writable()


CORRECT = {"name": "correct", "function": "rewards.correctness:exact_answer", "weight": 1.0}


def test_changed_rewards_are_refused_until_they_are_accepted(tmp_path: Path, folder: RunFolder):
    folder.close()
    functions = [{**CORRECT, "args": {"strict": True}}]
    other = make_config(tmp_path, rewards={"functions": functions})
    run = RunFolder.of(other)
    with pytest.raises(ValueError, match="or with the flags below") as caught:
        run.check(other)
    end = "now none (--accept rewards)"
    assert str(caught.value).splitlines()[1:] == [
        "  rewards.functions.correct.args.strict: was none, now true (--accept rewards)",
        f'  rewards.functions.format.function: was "rewards.format:well_formed", {end}',
        f"  rewards.functions.format.weight: was 0.1, {end}",
        f'  rewards.functions.format.on_error: was "exclude", {end}',
    ]
    run.check(other, accept=["rewards"])
    # Where something else changed, too, accepting the rewards is not enough.
    seed = make_config(tmp_path, rewards={"functions": functions}, run={"name": "run", "seed": 4})
    with pytest.raises(ValueError, match=r"run\.fork:\n  run\.seed: was 3, now 4$"):
        run.check(seed, accept=["rewards"])


def test_a_run_of_an_earlier_version_is_refused_in_one_sentence(folder: RunFolder, config: Config):
    folder.close()
    file = folder.path / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["plan"]["rollout_rows"] = settings["plan"].pop("slots")
    file.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="earlier version") as caught:
        RunFolder.of(config).check(config)
    assert str(caught.value) == (
        f"{folder.path} was written by an earlier version of gemma-grpo (its config.json has "
        "plan.rollout_rows); start another run with --run.name"
    )


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


def test_what_a_process_killed_while_loading_leaves_is_no_obstacle(tmp_path: Path):
    config = make_config(tmp_path)
    folder = RunFolder.of(config)
    folder.path.mkdir()
    for name in (".lock", "status.json", "status.json.tmp", "rewards.log"):
        (folder.path / name).touch()
    folder.check(config)
    with folder.held():
        folder.create(config)
    assert folder.holds_run
    (tmp_path / "run" / "config.json").rename(tmp_path / "run" / "notes.txt")
    with pytest.raises(ValueError, match="is not empty and not a run"):
        folder.check(config)


def test_a_held_folder_is_locked_and_removed_without_a_run(tmp_path: Path):
    path = tmp_path / "runs" / "deep" / "run"
    config = make_config(path.parent, run={"name": "run"})
    mine, other = RunFolder(path), RunFolder(path)
    with mine.held():
        for attempt in (other.check, other.create):
            with pytest.raises(ValueError, match="another process is using"):
                attempt(config)
        mine.status.touch()
    assert list(tmp_path.iterdir()) == []
    with mine.held():
        mine.create(config)
        mine.status.touch()
    assert (path / "config.json").is_file()
    with other.held():
        pass
    assert (path / "config.json").is_file()
    assert other.status.is_file()


@pytest.mark.parametrize("torn", ['{"event": "x", "st', '{"event": "x"', "{"])
def test_an_incomplete_line_does_not_corrupt_the_next_one(folder: RunFolder, torn: str):
    folder.journal("one", step=1)
    path = folder.path / "journal.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + torn, encoding="utf-8")
    folder.journal("two", step=2)
    folder.journal("two", step=3)
    assert [entry["step"] for entry in folder.events("one")] == [1]
    assert [entry["step"] for entry in folder.events("two")] == [2, 3]


STRANGE = 'a\u2028b\u2029c\x85d\x0be\x1cf\r\ng \N{GRINNING FACE} \\ " \x00'


def test_any_text_round_trips(folder: RunFolder):
    rows = [{"text": STRANGE}, {"text": ""}, {"text": STRANGE * 2}]
    folder.write_rollouts("test_before", rows)
    assert folder.read_rollouts("test_before") == rows
    surrogate = {"text": f"{STRANGE} \ud800"}
    folder.journal("said", **surrogate)
    folder.write_rollouts("step_000001", [surrogate])
    assert folder.read_rollouts("step_000001") == [surrogate]
    folder.journal("said", text=STRANGE)
    said = [surrogate["text"], STRANGE]
    assert [entry["text"] for entry in folder.events("said")] == said


def test_promise_4_a_resume_moves_later_records_aside_and_deletes_nothing(folder: RunFolder):
    def train(steps: Iterable[int]) -> None:
        for step in steps:
            folder.write_metrics({"step": step})
            folder.write_rollouts(f"step_{step:06d}", [{"step": step}])

    folder.journal("started")
    train(range(1, 5))
    for name in ("validation_000002", "validation_000004", "test_before"):
        folder.write_rollouts(name, [{"name": name}])
    folder.write_summary({"ended": "interrupted", "steps": 4})
    folder.rewind_to(2)
    assert folder.metrics == [{"step": 1}, {"step": 2}]
    assert folder.rollout_steps() == [1, 2]
    assert folder.summary is None
    assert [entry["step"] for entry in folder.events("resumed")] == [2]
    later = ["step_000003", "step_000004", "validation_000004"]
    for name in later:
        assert not folder.rollouts_file(name).exists()
        assert list(read_rows(folder.rollouts / f"{name}.superseded.jsonl"))
    assert folder.read_rollouts("validation_000002") == [{"name": "validation_000002"}]
    assert folder.read_rollouts("test_before") == [{"name": "test_before"}]
    (aside,) = read_rows(folder.path / "summary.superseded.jsonl")
    assert aside["steps"] == 4
    train([3])
    folder.rewind_to(2)
    assert folder.metrics == [{"step": 1}, {"step": 2}]
    superseded = list(read_rows(folder.path / "metrics.superseded.jsonl"))
    assert {row["step"] for row in superseded} == {3, 4}
    assert set(superseded[0]) == {"time", "step"}


@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("line", [1, 2])
def test_a_line_that_does_not_parse_is_refused_and_an_unfinished_last_one_ignored(
    folder: RunFolder, config: Config, name: str, line: int
):
    for step in (1, 2, 3):
        folder.journal("checkpoint", step=step)
        folder.write_metrics({"step": step, "loss": 0.25})
    folder.close()
    path = folder.path / name
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    RunFolder.of(config).check(config)
    assert [row["step"] for row in folder.metrics][:2] == [1, 2]
    lines[line - 1] = lines[line - 1].replace(b'"step": ', b'"step"')
    path.write_bytes(b"".join(lines))
    told = rf"{name}, line {line}: not a JSON object; restore the file from a copy, or start"
    with pytest.raises(DamagedFileError, match=told):
        RunFolder.of(config).check(config)


def test_missing_answers_of_an_evaluation_are_refused(folder: RunFolder, config: Config):
    for step in (2, 4):
        folder.write_rollouts(f"validation_{step:06d}", [])
        folder.journal("evaluated", name="validation", step=step, file=f"validation_{step:06d}")
    folder.journal("resumed", step=2)
    folder.close()
    folder.rollouts_file("validation_000004").unlink()
    RunFolder.of(config).check(config)
    folder.rollouts_file("validation_000002").unlink()
    with pytest.raises(DamagedFileError, match=r"validation_000002.jsonl is missing; restore the"):
        RunFolder.of(config).check(config)


def test_a_damaged_configuration_and_a_missing_journal_are_refused(
    folder: RunFolder, config: Config
):
    folder.journal("started")
    folder.write_metrics({"step": 1})
    folder.close()
    journal = folder.path / "journal.jsonl"
    journal.rename(folder.path / "elsewhere")
    with pytest.raises(DamagedFileError, match=r"journal.jsonl is missing or empty, but metrics"):
        RunFolder.of(config).check(config)
    (folder.path / "elsewhere").rename(journal)
    cut(folder.path / "config.json", 30)
    with pytest.raises(DamagedFileError, match=r"config.json is damaged: .* from a copy, or start"):
        RunFolder.of(config).check(config)
