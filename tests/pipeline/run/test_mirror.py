"""The copy of a run folder, and the host that fetches it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from configs.load import config_to_json
from configs.schema import Config
from pipeline.run import mirror as mirror_module
from pipeline.run.checkpoint_files import CHECKPOINT_MARK
from pipeline.run.console import Console
from pipeline.run.mirror import Copier, Mirror, Store, check_mirror, fetch_run, mirror_url
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from tests.run_process import FakeTracker
from tests.samples import make_config

NAME = "run"
MEMORY = f"memory://mirror/{NAME}"


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def train(folder: RunFolder, step: int) -> None:
    """A step: its rollouts and metrics, a checkpoint in place of the one before the last."""
    checkpoint = folder.checkpoints / str(step)
    write(folder.path, {f"rollouts/step_{step:06d}.jsonl": f"rollouts {step}\n"})
    write(checkpoint, {"state/data": f"state {step}", CHECKPOINT_MARK: f"mark {step}"})
    write(folder.checkpoints, {"best/adapter.safetensors": f"best {step}"})
    old = folder.checkpoints / str(step - 2)
    for path in ("state/data", CHECKPOINT_MARK):
        (old / path).unlink(missing_ok=True)
    folder.write_metrics({"step": step})
    folder.journal("checkpoint", step=step)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "mirror").mkdir()
    run = {"dir": str(tmp_path / "here"), "mirror": str(tmp_path / "mirror")}
    return make_config(tmp_path, run=run)


@pytest.fixture
def folder(config: Config) -> RunFolder:
    """A run after two steps."""
    folder = RunFolder.of(config)
    write(folder.path, {"config.json": config_to_json(config), ".lock": ""})
    for step in (1, 2):
        train(folder, step)
    return folder


def content(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def copied(url: str = MEMORY) -> dict[str, str]:
    fs, root = fsspec.url_to_fs(url)
    names = fs.find(root)
    return {name.removeprefix(f"{root}/"): fs.cat_file(name).decode() for name in names}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to and deleted from stores, in this order."""
    found, write, delete = list[str](), Store.write, Store.delete

    def written(store: Store, path: str, what: bytes | Path) -> None:
        found.append(f"+{path}")
        write(store, path, what)

    def deleted(store: Store, path: str) -> None:
        found.append(f"-{path}")
        delete(store, path)

    monkeypatch.setattr(Store, "write", written)
    monkeypatch.setattr(Store, "delete", deleted)
    return found


# --- copying


def test_a_run_folder_is_copied_without_what_is_temporary_or_left_out(
    folder: RunFolder, tmp_path: Path
):
    whole = content(folder.path)
    write(folder.path, {"status.json": "", "wandb/x": "", "plan.json.tmp": ""})
    write(folder.checkpoints, {"3.orbax-checkpoint-tmp-7/state/data": "", "best/a.tmp": ""})
    url = f"file://{tmp_path}/mirror/{NAME}"
    Copier(folder.path, url).copy()
    assert copied(url) == whole


def test_only_what_has_changed_is_copied(folder: RunFolder, done: list[str]):
    copier = Copier(folder.path, MEMORY)
    copier.copy()
    done.clear()
    copier.copy()
    assert done == []
    # Of equal size: the time tells.
    changed = folder.checkpoints / "best" / "adapter.safetensors"
    changed.write_text("best 9")
    later_s = changed.stat().st_mtime + 60
    os.utime(changed, (later_s, later_s))
    copier.copy()
    assert done == ["+checkpoints/best/adapter.safetensors"]
    assert copied() == content(folder.path)
    # The next process does not know the times, and copies what may have been replaced.
    done.clear()
    Copier(folder.path, MEMORY).copy()
    again = [
        "config.json",
        "journal.jsonl",
        "metrics.jsonl",
        "checkpoints/best/adapter.safetensors",
    ]
    assert [one for one in done if ".lock" not in one] == [f"+{path}" for path in again]


def test_a_file_that_is_deleted_meanwhile_is_left_to_the_next_copy(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    write, copier = Store.write, Copier(folder.path, MEMORY)

    def train_first(store: Store, path: str, what: bytes | Path) -> None:
        if path == "checkpoints/1/state/data":
            train(folder, 3)
        write(store, path, what)

    monkeypatch.setattr(Store, "write", train_first)
    copier.copy()
    assert "checkpoints/1/state/data" not in copied()
    copier.copy()
    assert copied() == content(folder.path)


def test_a_copy_that_is_cut_anywhere_leaves_whole_checkpoints_with_their_records(
    folder: RunFolder, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
):
    left, url = 10**9, mirror_url(config)
    assert url is not None
    write, delete = Store.write, Store.delete

    class CutError(Exception):
        pass

    def cut(operation: Callable[..., None]) -> Callable[..., None]:
        def maybe(*arguments: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CutError
            operation(*arguments)

        return maybe

    Copier(folder.path, url).copy()
    monkeypatch.setattr(Store, "write", cut(write))
    monkeypatch.setattr(Store, "delete", cut(delete))
    train(folder, 3)
    shutil.copytree(url, tmp_path / "before")
    for place in range(20):
        left = place
        shutil.rmtree(url)
        shutil.copytree(tmp_path / "before", url)
        try:
            Copier(folder.path, url).copy()
        except CutError:
            there = make_config(
                tmp_path, run={"dir": f"{tmp_path}/{place}", "mirror": config.run.mirror}
            )
            fetch_run(there, say=lambda _: None)
            found = RunFolder.of(there)
            steps = {
                int(path.parent.name) for path in found.checkpoints.glob(f"*/{CHECKPOINT_MARK}")
            }
            assert steps
            assert steps <= {entry["step"] for entry in found.events("checkpoint")}
            for step in steps:
                assert (found.checkpoints / f"{step}/state/data").read_text() == f"state {step}"
        else:
            break
    assert place == 10  # writes and deletions
    assert copied(url) == content(folder.path)


# --- the thread


def records(
    folder: RunFolder, mirror: Mirror | None = None, said: list[str] | None = None
) -> Records:
    shown = [] if said is None else said
    return Records(folder, FakeTracker(), Console(write=shown.append), mirror)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of a thread
            await asyncio.sleep(0.005)


def test_a_run_is_copied_at_its_start_after_each_checkpoint_and_at_its_end(folder: RunFolder):
    mirror = Mirror(MEMORY)
    kept = records(folder, mirror)

    async def run() -> None:
        mirror.start(folder.path, log_event=kept.event)
        await until(lambda: copied() == content(folder.path))
        train(folder, 3)
        kept.checkpoint({"step": 3})
        await until(lambda: copied() == content(folder.path))
        write(folder.path, {"export/model": "exported"})
        kept.exported({"folder": "export", "version": 3, "mean_difference": None,
                       "reason": "first"})  # fmt: skip
        await until(lambda: copied() == content(folder.path))
        write(folder.path, {"summary.json": "{}"})
        await mirror.finish()

    asyncio.run(run())
    assert copied() == content(folder.path)
    assert list(folder.events("mirror")) == []


def test_a_failure_is_reported_and_the_next_checkpoint_tries_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    mirror, said, write, is_full, tries = Mirror(MEMORY), list[str](), Store.write, True, 0
    kept = records(folder, mirror, said)

    def write_if_possible(store: Store, path: str, what: bytes | Path) -> None:
        nonlocal tries
        if is_full:
            tries += 1
            raise OSError("no space\nat all")
        write(store, path, what)

    monkeypatch.setattr(Store, "write", write_if_possible)

    async def run() -> None:
        nonlocal is_full
        mirror.start(folder.path, log_event=kept.event)
        await until(lambda: len(said) == 1)
        kept.checkpoint({"step": 2})
        await until(lambda: tries == 2)
        is_full = False
        await mirror.finish()

    asyncio.run(run())
    line = f"mirror {MEMORY}: cannot be written (no space); the next checkpoint tries again"
    assert said == [line] * 2
    assert copied() == content(folder.path)


def test_an_incomplete_end_is_said(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    said, ends = list[str](), threading.Event()
    mirror = Mirror(MEMORY)
    kept = records(folder, mirror, said)
    monkeypatch.setattr(mirror_module, "FINISH_S", 0.1)

    async def run() -> None:
        mirror.start(folder.path, log_event=kept.event)
        await until(lambda: copied() == content(folder.path))

        def fail(*_: object) -> None:
            ends.wait()

        monkeypatch.setattr(Store, "write", fail)
        write(folder.path, {"summary.json": "{}"})
        await mirror.finish()

    asyncio.run(run())
    ends.set()
    assert said[-1] == (
        f"mirror {MEMORY}: the end of the run could not be copied; the same command continues the "
        "copy from this host"
    )


# --- the other host


@pytest.fixture
def there(config: Config, tmp_path: Path) -> Config:
    """The request on another host."""
    return make_config(tmp_path, run={"dir": f"{tmp_path}/there", "mirror": config.run.mirror})


def copy(folder: RunFolder, config: Config) -> str:
    url = mirror_url(config)
    assert url is not None
    Copier(folder.path, url).copy()
    return url


def test_the_run_of_another_host_is_fetched(folder: RunFolder, there: Config):
    url, said = copy(folder, there), list[str]()
    write(Path(url), {"checkpoints/9/state/data": "its mark was not copied"})
    fetch_run(there, say=said.append)
    fetched = RunFolder.of(there)
    assert content(fetched.path) == content(folder.path)
    assert said == [f"fetching the run from {url}"]
    # The run is on this host now.
    fetch_run(there, say=said.append)
    assert len(said) == 1


def test_without_a_run_in_the_mirror_a_new_one_begins(there: Config):
    fetch_run(there, say=print)
    assert not RunFolder.of(there).path.exists()
    assert Store(str(mirror_url(there))).sizes() == {}


def test_a_fetch_that_fails_stops_the_start_and_the_next_one_is_complete(
    folder: RunFolder, there: Config, monkeypatch: pytest.MonkeyPatch
):
    url = copy(folder, there)
    read = Store.read

    def fail(store: Store, path: str, file: Path) -> None:
        if path == "metrics.jsonl":
            raise OSError("connection lost")
        read(store, path, file)

    with monkeypatch.context() as broken:
        broken.setattr(Store, "read", fail)
        with pytest.raises(ValueError, match=f"{url} cannot be used: connection lost; nothing"):
            fetch_run(there, say=print)
    assert not RunFolder.of(there).path.exists()
    fetch_run(there, say=print)
    assert content(RunFolder.of(there).path) == content(folder.path)


def test_an_unmounted_disk_is_no_empty_mirror(there: Config, tmp_path: Path):
    (tmp_path / "mirror").rmdir()
    with pytest.raises(ValueError, match=r"there is no folder .*/mirror; create or mount it"):
        fetch_run(there, say=print)
    assert not (tmp_path / "mirror").exists()


@pytest.mark.parametrize("mirror", ["here", "here/run"])
def test_the_copy_is_not_the_run_folder_nor_in_it(folder: RunFolder, tmp_path: Path, mirror: str):
    with pytest.raises(ValueError, match="would contain each other; name a folder on another disk"):
        check_mirror(str(tmp_path / mirror), folder.path)
    check_mirror(str(tmp_path), folder.path)
