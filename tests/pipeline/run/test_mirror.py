"""The copy of a run folder, and the host that fetches it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest

from configs.load import config_to_json
from configs.schema import Config
from pipeline.run import mirror as module
from pipeline.run.checkpoint_files import CHECKPOINT_MARK
from pipeline.run.console import Console
from pipeline.run.mirror import Copier, Mirror, Snapshot, check_mirror, fetch_run, mirror_url
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from tests.run_process import FakeTracker
from tests.samples import make_config

MEMORY = "memory://mirror/run"


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
    for path in ("state/data", CHECKPOINT_MARK):
        (folder.checkpoints / str(step - 2) / path).unlink(missing_ok=True)
    folder.write_metrics({"step": step})
    folder.journal("checkpoint", step=step)


def request(tmp_path: Path, host: str) -> Config:
    return make_config(tmp_path, run={"dir": f"{tmp_path}/{host}", "mirror": f"{tmp_path}/mirror"})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run after two steps."""
    (tmp_path / "mirror").mkdir()
    config = request(tmp_path, "here")
    folder = RunFolder.of(config)
    write(folder.path, {"config.json": config_to_json(config), ".lock": ""})
    for step in (1, 2):
        train(folder, step)
    return folder


def content(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def copied() -> dict[str, str]:
    fs, root = fsspec.url_to_fs(MEMORY)
    return {name.removeprefix(f"{root}/"): fs.cat_file(name).decode() for name in fs.find(root)}


def copy(folder: RunFolder, url: str = MEMORY) -> None:
    Copier(url).copy(Snapshot(folder.path))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to stores, in this order."""
    found, write = list[str](), module._write

    def note(store: object, path: str, what: bytes | Path) -> None:
        found.append(path)
        write(store, path, what)

    monkeypatch.setattr(module, "_write", note)
    return found


# --- copying


def test_only_what_has_changed_is_copied_and_nothing_temporary(
    folder: RunFolder, written: list[str]
):
    whole, copier = content(folder.path), Copier(MEMORY)
    write(folder.path, {"status.json": "", "wandb/x": "", "plan.json.tmp": "", ".x.replaced/a": ""})
    write(folder.checkpoints, {"3.orbax-checkpoint-tmp-7/state/data": "", "best/a.tmp": ""})
    copier.copy(Snapshot(folder.path))
    assert copied() == whole
    written.clear()
    # Of equal size: the time tells.
    best = folder.checkpoints / "best" / "adapter.safetensors"
    best.write_text("best 9")
    later_s = best.stat().st_mtime + 60
    os.utime(best, (later_s, later_s))
    copier.copy(Snapshot(folder.path))
    assert written == ["checkpoints/best/adapter.safetensors"]
    # The next process does not know the times, and copies what may have been replaced.
    written.clear()
    copier, moment = Copier(MEMORY), Snapshot(folder.path)
    train(folder, 3)  # deletes a checkpoint: the next copy follows
    copier.copy(moment)
    records = [".lock", "config.json", "journal.jsonl", "metrics.jsonl"]
    assert written[:4] == records
    assert copied()["metrics.jsonl"].count("\n") == 2
    copier.copy(Snapshot(folder.path))
    assert {path for path in copied() if path.endswith("data")} == {
        f"checkpoints/{step}/state/data" for step in (2, 3)
    }


def test_a_copy_that_is_cut_anywhere_leaves_whole_checkpoints_with_their_records(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, before, write = f"{tmp_path}/mirror/run", tmp_path / "before", module._write
    copy(folder, url)
    train(folder, 3)
    shutil.copytree(url, before)
    for place in range(9):  # rollouts, four records, state, mark, best adapter
        left = iter(range(place))

        def cut(store: object, path: str, what: bytes | Path, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write(store, path, what)

        shutil.rmtree(url)
        shutil.copytree(before, url)
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(module, "_write", cut)
            copy(folder, url)
        there = request(tmp_path, str(place))
        fetch_run(there, say=lambda _: None)
        found = RunFolder.of(there)
        steps = {int(path.parent.name) for path in found.checkpoints.glob(f"*/{CHECKPOINT_MARK}")}
        assert steps
        assert steps <= {entry["step"] for entry in found.events("checkpoint")}
        for step in steps:
            assert (found.checkpoints / f"{step}/state/data").read_text() == f"state {step}"
    assert content(Path(url)) == content(folder.path)


# --- the thread


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of a thread
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("end", ["fails", "hangs"])
def test_a_run_is_copied_after_each_checkpoint_and_a_failure_is_reported(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, end: str
):
    mirror, said, writes, hangs = Mirror(MEMORY), list[str](), module._write, threading.Event()
    kept = Records(folder, FakeTracker(), Console(write=said.append), mirror)
    if end == "hangs":
        monkeypatch.setattr(module, "FINISH_S", 0.1)

    def full(*_: object) -> None:
        raise OSError("no space\nat all")

    async def run() -> None:
        monkeypatch.setattr(module, "_write", full)
        mirror.start(folder.path, log_event=kept.event)
        await until(lambda: len(said) == 1)
        monkeypatch.setattr(module, "_write", writes)
        train(folder, 3)
        kept.checkpoint({"step": 3})
        await until(lambda: copied() == content(folder.path))
        last = full if end == "fails" else lambda *_: hangs.wait()
        monkeypatch.setattr(module, "_write", last)
        write(folder.path, {"summary.json": "{}"})
        await mirror.finish()

    asyncio.run(run())
    hangs.set()
    assert said[0] == f"mirror {MEMORY}: cannot be written (no space); the next copy tries again"
    why = "no space" if end == "fails" else "not in 0 s"
    (told,) = said[1:]
    by_hand = f"copy {folder.path} there by hand, unless the run continues on this host"
    assert told == f"mirror {MEMORY}: the end of the run is not copied ({why}); {by_hand}"


# --- the other host


def test_the_run_of_another_host_is_fetched_whole_or_not_at_all(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    there, said = request(tmp_path, "there"), list[str]()
    fetched, url = RunFolder.of(there), str(mirror_url(there))
    fetch_run(there, say=said.append)
    assert not fetched.path.exists()  # the mirror has no run
    copy(folder, url)
    write(Path(url), {"checkpoints/9/state/data": "its mark was not copied"})

    def fail(*_: object) -> None:
        raise OSError("connection lost")

    with monkeypatch.context() as broken:
        broken.setattr("fsspec.implementations.dirfs.DirFileSystem.get_file", fail)
        with pytest.raises(ValueError, match=f"{url} cannot be used: connection lost; nothing"):
            fetch_run(there, say=print)
    assert not fetched.path.exists()
    fetch_run(there, say=said.append)
    assert content(fetched.path) == content(folder.path)
    fetch_run(there, say=said.append)  # the run is on this host now
    assert said == [f"fetching the run from {url}"]


def test_an_unmounted_disk_is_no_empty_mirror(tmp_path: Path):
    with pytest.raises(ValueError, match=r"there is no folder .*/mirror; create or mount it"):
        fetch_run(request(tmp_path, "there"), say=print)
    assert not (tmp_path / "mirror").exists()


@pytest.mark.parametrize(
    ("mirror", "run"), [("here", "here/run"), ("here/run", "here/run"), (".", "run/run")]
)
def test_promise_4_copy_and_run_folder_do_not_contain_each_other(
    folder: RunFolder, tmp_path: Path, mirror: str, run: str
):
    with pytest.raises(ValueError, match="would contain each other; name a folder on another disk"):
        check_mirror(str(tmp_path / mirror), tmp_path / run)
    check_mirror(str(tmp_path), folder.path)
