"""Copies of a run folder: each is one state, whatever happens while it is made."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from pipeline.contracts.record_files import DamagedFileError
from pipeline.run import mirror_copier
from pipeline.run.mirror_copier import BusyFolderError, OtherRunError, machine_of
from pipeline.run.mirror_store import STAGED, Manifest, Store
from pipeline.run.run_folder import RunFolder
from tests.pipeline.run.mirror_parts import (
    CutError,
    CutStore,
    content,
    damaged,
    fetched,
    make_copier,
    make_run,
    train,
    write,
)


def test_another_host_gets_the_run_folder(tmp_path: Path, url: str):
    run, store = make_run(tmp_path / "run", steps=3), Store(url)
    left_out = ["wandb/x", "profile/x", "superseded/0001/x", "status.json", "export.tmp/x"]
    write(run.path, dict.fromkeys([*left_out, "checkpoints/4.orbax-checkpoint-tmp/x"], "x"))
    manifest = make_copier(run, store).copy()
    found = fetched(store, tmp_path / "there")
    assert found == content(run.path)
    assert found is not None
    assert not {"wandb/x", "status.json", "export.tmp/x"} & found.keys()
    assert (manifest.number, manifest.checkpoint) == (1, 3)
    assert not (run.path / STAGED).exists()


def test_only_what_is_new_is_copied_and_what_is_not_needed_is_deleted(tmp_path: Path, url: str):
    run, store = make_run(tmp_path / "run", steps=2), Store(url)
    copier = make_copier(run, store)
    copier.copy()
    assert copier.is_current()
    train(run, 3)
    assert not copier.is_current()
    stored, put = list[str](), store.put

    def note(file: Path, sha256: str) -> None:
        stored.append(sha256)
        put(file, sha256)

    store.put = note  # type: ignore[method-assign]
    copier.copy()
    # Rollouts, checkpoint, best, metrics, journal, lock.
    assert len(stored) == 6
    manifest = store.newest()
    assert manifest is not None
    assert manifest.number == 2
    assert manifest.sha256s == store.sizes().keys()
    assert fetched(store, tmp_path / "there") == content(run.path)


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_copy_that_is_cut_anywhere_leaves_one_of_both_states(tmp_path: Path, url: str):
    ends = 0
    for cut in count():
        folder, there = tmp_path / f"run{cut}", f"{url}{cut}"
        run = make_run(folder, steps=2)
        make_copier(run, Store(there)).copy()
        before = content(folder)
        train(run, 3)
        after = content(folder)
        try:
            make_copier(run, CutStore(there, left=cut)).copy()
            ends = cut
        except CutError:
            pass
        found = fetched(Store(there), tmp_path / f"there{cut}")
        assert found in (before, after)
        # The next process of the run completes the copy.
        train(run, 4)
        make_copier(run, Store(there)).copy()
        assert fetched(Store(there), tmp_path / f"later{cut}") == content(folder)
        manifest = Store(there).newest()
        assert manifest is not None
        assert manifest.sha256s == Store(there).sizes().keys()
        if ends:
            break
    assert ends > 10


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_first_copy_that_is_cut_leaves_nothing_or_a_state(tmp_path: Path, url: str):
    for cut in count():
        folder, there = tmp_path / f"run{cut}", f"{url}{cut}"
        run = make_run(folder)
        try:
            make_copier(run, CutStore(there, left=cut)).copy()
        except CutError:
            try:
                found = fetched(Store(there), tmp_path / f"there{cut}")
            except DamagedFileError:  # reported, not taken for an empty mirror
                continue
            assert found in (None, content(folder))
        else:
            break


def test_a_state_is_of_one_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run")
    store = Store(str(tmp_path / "mirror"))
    stage, steps = mirror_copier._stage, iter(range(2, 5))

    def stage_while_the_run_goes_on(file: Path, staged: Path) -> Path:
        step = next(steps, None)
        if step is not None:
            train(run, step)
        return stage(file, staged)

    monkeypatch.setattr(mirror_copier, "_stage", stage_while_the_run_goes_on)
    make_copier(run, store).copy()
    assert fetched(store, tmp_path / "there") == content(run.path)


def test_the_state_outlives_what_the_run_does_while_it_is_copied(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=2)
    store = Store(str(tmp_path / "mirror"))
    before, put = content(run.path), store.put

    def put_while_the_run_goes_on(file: Path, sha256: str) -> None:
        train(run, 3)
        put(file, sha256)

    store.put = put_while_the_run_goes_on  # type: ignore[method-assign]
    make_copier(run, store).copy()
    assert fetched(store, tmp_path / "there") == before


def test_a_folder_that_changes_all_the_time_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, numbers = make_run(tmp_path / "run"), count()
    scan = mirror_copier.scan
    monkeypatch.setattr(
        mirror_copier, "scan", lambda folder: {**scan(folder), "x": (next(numbers), 0, 0)}
    )
    with pytest.raises(BusyFolderError, match="changes faster"):
        make_copier(run, Store(str(tmp_path / "mirror"))).copy()


def test_rewards_that_print_all_the_time_delay_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, scan = make_run(tmp_path / "run", steps=2), mirror_copier.scan

    def scan_while_rewards_print(folder: Path) -> dict[str, mirror_copier.Stamp]:
        with run.rewards_log.open("a") as log:
            log.write("seen\n")
        return scan(folder)

    monkeypatch.setattr(mirror_copier, "scan", scan_while_rewards_print)
    store = Store(str(tmp_path / "mirror"))
    make_copier(run, store).copy()
    found = fetched(store, tmp_path / "there")
    assert found is not None
    assert found["metrics.jsonl"] == content(run.path)["metrics.jsonl"]


def test_the_mirror_of_another_run_is_not_overwritten(tmp_path: Path):
    store = Store(str(tmp_path / "mirror"))
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second", steps=0)
    second.journal("another")
    train(second, 1)
    copier = make_copier(first, store)
    copier.copy()
    with pytest.raises(OtherRunError, match="does not continue: the run went on elsewhere"):
        make_copier(second, store).copy()
    fetched(store, tmp_path / "third")
    third = RunFolder(tmp_path / "third")
    third.journal("fetched")
    train(third, 2)
    make_copier(third, store).copy()
    train(first, 2)
    with pytest.raises(OtherRunError):
        copier.copy()


def test_a_guard_that_fails_leaves_the_state_before(tmp_path: Path):
    store, run = Store(str(tmp_path / "mirror")), make_run(tmp_path / "run")
    make_copier(run, store).copy()
    before = content(run.path)
    train(run, 2)

    def refuse() -> None:
        raise CutError

    with pytest.raises(CutError):
        make_copier(run, store, guard=refuse).copy()
    assert fetched(store, tmp_path / "there") == before


def test_programs_are_copied_up_to_a_size_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirror_copier, "MOST_PROGRAM_BYTES", 12)
    programs = tmp_path / "xla"
    write(programs, {"a-cache": "aaaaa", "b-cache": "bbbbb", "c-cache": "ccccc", "other": "x"})
    for age, name in enumerate(("b-cache", "c-cache", "a-cache")):
        (programs / name).touch()
        os.utime(programs / name, (100 - age, 100 - age))
    store, run = Store(str(tmp_path / "mirror")), make_run(tmp_path / "run")
    copier = make_copier(run, store, programs=programs)
    copier.copy()
    copier.copy_programs()
    assert not copier.is_current()
    manifest = copier.copy()
    assert manifest.programs.keys() == {"b-cache", "c-cache"}
    assert copier.is_current()
    assert manifest.sha256s == store.sizes().keys()
    # The next process keeps them, as long as it runs on such a machine.
    train(run, 2)
    assert make_copier(run, store).copy().programs == manifest.programs
    train(run, 3)
    assert make_copier(run, store, machine="tpu").copy().programs == {}


def test_programs_of_a_cpu_are_for_its_kind():
    assert machine_of("cpu").startswith("cpu ")
    assert machine_of("cpu") == machine_of("cpu")
    assert machine_of("tpu").startswith("tpu ")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a\0b"])
def test_a_manifest_cannot_name_files_outside_of_the_run_folder(tmp_path: Path, path: str):
    store = Store(str(tmp_path / "mirror"))
    manifest = make_copier(make_run(tmp_path / "run"), store).copy()
    store.publish(damaged(manifest, path))
    with pytest.raises(DamagedFileError, match="outside of the run folder"):
        Store(str(tmp_path / "mirror")).newest()


def test_a_damaged_file_is_noticed(tmp_path: Path):
    store = Store(str(tmp_path / "mirror"))
    manifest = make_copier(make_run(tmp_path / "run"), store).copy()
    sha256 = manifest.files["config.json"].sha256
    (tmp_path / "mirror" / "files" / sha256).write_text("!!", encoding="utf-8")
    with pytest.raises(DamagedFileError, match=r"which is config\.json of the run, is damaged"):
        fetched(store, tmp_path / "there")


def test_a_reader_goes_on_with_a_newer_state(tmp_path: Path):
    store, run = Store(str(tmp_path / "mirror")), make_run(tmp_path / "run")
    copier = make_copier(run, store)
    old, read = copier.copy(), []

    def read_while_the_run_goes_on(manifest: Manifest) -> None:
        read.append(manifest.number)
        if manifest.number < 3:
            train(run, manifest.number + 1)
            copier.copy()
            raise FileNotFoundError

    assert store.read_consistently(old, read_while_the_run_goes_on).number == 3
    assert read == [1, 2, 3]
