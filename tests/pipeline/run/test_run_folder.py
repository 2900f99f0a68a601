"""The run folder: refusals, locking, and records that survive a kill."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from configs.schema import Config
from pipeline.run.folder_lock import LockedFolder
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


def test_a_held_folder_is_locked_and_removed_without_a_run(tmp_path: Path):
    config = make_config(tmp_path)
    mine, other = RunFolder.of(config), RunFolder.of(config)
    with mine.held():
        for attempt in (other.check, other.create):
            with pytest.raises(ValueError, match="another process is using"):
                attempt(config)
        mine.status.touch()
    assert not mine.path.exists()
    mine.path.mkdir()
    for name in (".lock", "status.json", "status.json.tmp", "rewards.log"):
        (mine.path / name).touch()  # what a process leaves that is killed while it loads
    mine.check(config)
    with mine.held():
        mine.create(config)
    with other.held():
        pass
    assert mine.holds_run
    assert other.status.is_file()
    (mine.path / "config.json").rename(mine.path / "notes.txt")
    with pytest.raises(ValueError, match="is not empty and not a run"):
        mine.check(config)


STRANGE = 'a\u2028b\u2029c\x85d\x0be\x1cf\r\ng \N{GRINNING FACE} \\ " \x00'


def test_any_text_round_trips(folder: RunFolder):
    rows = [{"text": STRANGE}, {"text": ""}, {"text": STRANGE * 2}]
    folder.write_rollouts("test_before", rows)
    assert folder.read_rollouts("test_before") == rows
    surrogate = {"text": f"{STRANGE} \ud800"}
    folder.journal("said", **surrogate)
    folder.write_rollouts("step_000001", [surrogate])
    assert folder.read_rollouts("step_000001") == [surrogate]
    journal = folder.path / "journal.jsonl"
    journal.write_text(journal.read_text(encoding="utf-8") + '{"event": "x"', encoding="utf-8")
    folder.journal("said", text=STRANGE)  # the incomplete line before it is dropped
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


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (
            "journal.jsonl",
            ('"step": 2', '"step"2'),
            "line 2: not a JSON object; restore the file from",
        ),
        (
            "metrics.jsonl",
            ('"step": 2', '"step"2'),
            "line 2: not a JSON object; restore the file from",
        ),
        ("config.json", ('"seed"', '"se'), "is damaged: .* from a copy, or start"),
        ("journal.jsonl", None, "is missing or empty, but metrics.jsonl has 3 steps; restore"),
        ("rollouts/validation_000002.jsonl", None, "is missing; restore the file from a copy"),
        ("rollouts/validation_000004.jsonl", None, ""),
    ],
)
def test_promise_4_what_a_resume_cannot_read_is_refused_with_the_remedy(
    folder: RunFolder, config: Config, name: str, change: tuple[str, str] | None, told: str
):
    for step in (1, 2, 3):
        folder.journal("checkpoint", step=step)
        folder.write_metrics({"step": step})
    for step in (2, 4):
        folder.write_rollouts(f"validation_{step:06d}", [])
        folder.journal("evaluated", name="validation", step=step, file=f"validation_{step:06d}")
    folder.journal("resumed", step=3)
    folder.close()
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "unfin')  # what a killed process leaves
    RunFolder.of(config).check(config)
    damaged = folder.path / name
    if change is None:
        damaged.unlink()
    else:
        damaged.write_text(damaged.read_text().replace(*change))
    if told:
        with pytest.raises(
            DamagedFileError, match=f"{damaged.name}.* {told}|{damaged.name}, {told}"
        ):
            RunFolder.of(config).check(config)
    else:  # the resume has rolled it back
        RunFolder.of(config).check(config)


# --- locked folders


def test_only_folders_of_ended_processes_are_deleted(tmp_path: Path):
    others = {"own-being-made", "own-run", "other"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "own-run" / ".lock").touch()  # like a run folder or an environment
    own, theirs = (LockedFolder(tmp_path, prefix="own-") for _ in range(2))
    (theirs.path / "file").write_text("theirs")
    LockedFolder(tmp_path, prefix="own-").remove()
    assert (theirs.path / "file").read_text() == "theirs"
    os.close(theirs._lock)  # the kernel does this when a process ends
    LockedFolder(tmp_path, prefix="own-").remove()
    assert not theirs.path.exists()
    own.remove()
    assert {path.name for path in tmp_path.iterdir()} == others
