"""A host dies; another one, with another folder and home, resumes from the mirror: the same run."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.run.checkpoint_files import CHECKPOINT_MARK
from pipeline.run.mirror import Copier, fetch_run
from pipeline.run.run_folder import RunFolder
from tests.fakes import Disk, Killed, Process, Script, left_behind
from tests.samples import make_config, make_data

pytestmark = pytest.mark.slow

TABLES: dict[str, Any] = {
    "budget": {"steps": 5},
    "checkpoint": {"every_steps": 2},
    "eval": {"every_steps": 2},
}
SPLITS = ("train", "validation", "test")
DATA = make_data(validation=3)


def host(folder: Path, mirror: Path) -> Config:
    """The run of one host: its run folders and data are in its user's home."""
    data = {name: {"path": str(folder / f"{name}.jsonl")} for name in SPLITS}
    run = {"dir": str(folder), "mirror": str(mirror)}
    return make_config(folder, run=run, data=data, **TABLES)


def write_disk(disk: Disk, folder: RunFolder) -> None:
    """Writes the fake learner's checkpoints where those of a learner are."""
    for version, state in disk.items():
        path = folder.checkpoints / str(version)
        path.mkdir(parents=True, exist_ok=True)
        (path / "state").write_text(json.dumps([state, disk.previous[version]]), encoding="utf-8")
        (path / CHECKPOINT_MARK).touch()
    if disk.best is not None:
        folder.checkpoints.mkdir(exist_ok=True)
        (folder.checkpoints / "best").write_text(json.dumps(disk.best), encoding="utf-8")


def read_disk(folder: RunFolder) -> Disk:
    disk = Disk()
    for path in sorted(folder.checkpoints.glob("*/state")):
        (adapter, meta), previous = json.loads(path.read_text(encoding="utf-8"))
        version = int(path.parent.name)
        disk[version], disk.previous[version] = (adapter, meta), previous
    best = folder.checkpoints / "best"
    if best.is_file():
        version, adapter = json.loads(best.read_text(encoding="utf-8"))
        disk.best = (version, adapter)
    return disk


def killed_after_copy(config: Config, call: int) -> bool:
    """Runs until a call of a worker; the state before it is in the mirror. False: it was too late.

    A run folder is lost with its host: the state after the copy is nowhere.
    """
    process = Process(config, disk=Disk(), data=DATA)
    copier = Copier(process.folder.path, f"{config.run.mirror}/run")

    def die() -> None:
        write_disk(process.disk, process.folder)
        copier.copy()
        raise Killed

    process.script.on[call] = die
    try:
        process.run()
    except Killed:
        return True
    return False


def test_promise_3_another_host_ends_with_the_same_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = Process(host(tmp_path / "whole", tmp_path), disk=Disk(), data=DATA)
    assert whole.run() == "finished"
    for call in count():
        here, there = tmp_path / f"{call}/home/ann/runs", tmp_path / f"{call}/home/bob/work/runs"
        mirror = tmp_path / f"{call}/mirror"
        mirror.mkdir(parents=True)
        monkeypatch.setenv("HOME", str(here.parent))
        if not killed_after_copy(host(here, mirror), call):
            break
        monkeypatch.setenv("HOME", str(there.parent))
        config, said = host(there, mirror), list[str]()
        fetch_run(config, say=said.append)
        assert len(said) == 1
        folder = RunFolder.of(config)
        folder.check(config)
        second = Process(config, disk=read_disk(folder), data=DATA, script=Script())
        assert second.run() == "finished"
        assert second.learner.adapter == whole.learner.adapter
        assert second.disk.best == whole.disk.best
        assert left_behind(second.folder) == left_behind(whole.folder)
    assert call > 30
