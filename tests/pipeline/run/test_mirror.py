"""The run's end of its mirror."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.schema import Config
from pipeline.contracts.cache_folder import CACHE_VARIABLE
from pipeline.run import mirror as mirror_module
from pipeline.run.console import Console
from pipeline.run.mirror import Mirror
from pipeline.run.mirror_fetch import fetch_run
from pipeline.run.mirror_lease import Holder, Lease
from pipeline.run.mirror_store import Store
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from tests.fakes import FakeClock, FakeTracker, make_config
from tests.pipeline.run.mirror_parts import content, fetched, make_copier, make_run, train
from tests.pipeline.run.s3_server import BUCKET, S3Server, s3_server

ROOT = Path(__file__).parents[3]
URL = f"s3://{BUCKET}/runs/run"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process imports this project; leases settle at once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("pipeline.run.mirror_lease._SETTLE_S", 0.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))  # not up to 1 GiB of programs
    return make_config(tmp_path, run={"mirror": f"s3://{BUCKET}/runs"})


@pytest.fixture
def folder(config: Config) -> RunFolder:
    return make_run(RunFolder.of(config).path)


def records(folder: RunFolder, mirror: Mirror | None = None) -> Records:
    return Records(folder, FakeTracker(), Console(write=lambda _: None), mirror)


def told(folder: RunFolder) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in entry.items() if key not in {"time", "event"}}
        for entry in folder.events("mirror")
    ]


def test_without_a_mirror_nothing_happens(tmp_path: Path):
    config = make_config(tmp_path)
    with closing(Mirror.of(config)) as mirror:
        mirror.acquire(tmp_path, print)
        asyncio.run(mirror.start(config, folder=tmp_path, log=records(RunFolder(tmp_path))))
        asyncio.run(mirror.finish())
    assert mirror.metrics() == {}
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_copied_until_its_end(config: Config, folder: RunFolder, tmp_path: Path):
    clock, said = FakeClock(), list[str]()

    async def run() -> None:
        with closing(Mirror(URL, now=clock)) as mirror:
            mirror.acquire(folder.path, said.append)
            await mirror.start(config, folder=folder.path, log=records(folder))
            clock.seconds = 7.0
            assert mirror.metrics() == {"mirror/behind_s": 7.0}
            train(folder, 2)
            await mirror.finish()
            assert mirror.metrics()["mirror/behind_s"] < 7

    asyncio.run(run())
    assert (said, told(folder)) == ([], [])
    store = Store(URL)
    assert fetched(store, tmp_path / "there") == content(folder.path)
    assert store.read_lease() is None


def test_the_metric_is_recorded_with_each_step(config: Config, folder: RunFolder):
    mirror = Mirror(URL)
    mirror._copied_s = mirror._now()
    metrics = {"sft/loss": 1.0, "sft/tokens_trained": 1.0}
    records(folder, mirror).sft_step(2, metrics)
    assert folder.metrics[-1].keys() == {"step", *metrics, "mirror/behind_s"}


def test_a_mirror_that_has_all_is_not_behind():
    clock = FakeClock()
    mirror = Mirror(URL, now=clock)
    mirror.receive({"copied": {"seconds": 3.0}})
    assert mirror.metrics() == {"mirror/behind_s": 3.0}
    clock.seconds += 100.0
    mirror.receive({"current": True})
    clock.seconds += 4.0
    assert mirror.metrics() == {"mirror/behind_s": 4.0}


def test_a_failure_that_cannot_be_journaled_does_not_end_the_run(
    config: Config, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder, "journal", full)
    mirror = Mirror(URL)
    monkeypatch.setattr(mirror, "spawn", full)
    mirror.acquire(folder.path, print)

    async def run() -> None:
        await mirror.start(config, folder=folder.path, log=records(folder))
        mirror.receive({"failed": "cannot be written"})

    with closing(mirror):
        asyncio.run(run())


def test_what_is_not_copied_at_the_end_is_said(
    config: Config, folder: RunFolder, server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mirror_module, "FINISH_S", 0.1)

    async def run() -> int:
        with closing(Mirror(URL)) as mirror:
            mirror.acquire(folder.path, print)
            server.writable = False
            await mirror.start(config, folder=folder.path, log=records(folder))
            (child,) = psutil.Process().children()
            await mirror.finish()
            return child.pid

    child = asyncio.run(run())
    entry = told(folder)[-1]
    assert {"left_files", "left_bytes"} <= entry.keys()
    assert not psutil.pid_exists(child)


def test_the_death_of_the_process_is_reported_and_its_lease_is_given_back(
    config: Config, folder: RunFolder
):
    async def run() -> None:
        with closing(Mirror(URL)) as mirror:
            mirror.acquire(folder.path, print)
            await mirror.start(config, folder=folder.path, log=records(folder))
            (child,) = psutil.Process().children()
            child.kill()
            await mirror._ended.wait()
            await mirror.finish()

    asyncio.run(run())
    assert "its process has ended" in told(folder)[0]["failed"]
    assert Store(URL).read_lease() is None


def test_a_run_that_was_overtaken_goes_on_without_its_mirror(config: Config, folder: RunFolder):
    async def run() -> None:
        with closing(Mirror(URL)) as mirror:
            mirror.acquire(folder.path, print)
            Store(URL).write_lease(
                {**vars(Holder("theirs", "far", "", 7, 0.0)), "since": "", "renewed_s": 1e12}
            )
            await mirror.start(config, folder=folder.path, log=records(folder))
            await mirror._ended.wait()
            await mirror.finish()
            assert mirror.metrics() == {}

    asyncio.run(run())
    (entry,) = told(folder)
    assert "is written by process 7 on host far" in entry["lost"]


# --- at the start


def test_a_lease_is_given_back_if_the_run_does_not_start(config: Config, folder: RunFolder):
    with closing(Mirror.of(config)) as mirror:
        mirror.acquire(folder.path, print)
        assert Store(URL).read_lease() is not None
    assert Store(URL).read_lease() is None


def test_a_mirror_that_went_on_elsewhere_is_refused(config: Config, tmp_path: Path):
    other = make_run(tmp_path / "other", steps=2)
    other.journal("elsewhere")
    make_copier(other, Store(URL)).copy()
    folder = make_run(RunFolder.of(config).path)
    with pytest.raises(ValueError, match=r"^run\.mirror: s3://.* does not continue"):
        Mirror.of(config).acquire(folder.path, print)
    assert Store(URL).read_lease() is None


def test_a_store_that_is_gone_stops_only_a_new_run(
    config: Config, folder: RunFolder, tmp_path: Path, server: S3Server
):
    server.stop()
    said: list[str] = []
    Mirror.of(config).acquire(folder.path, said.append)
    (line,) = said
    assert line.endswith("; the run starts, and is copied when the mirror answers")
    with pytest.raises(ValueError, match=r"^run\.mirror: s3://bucket/runs/run cannot be "):
        Mirror.of(config).acquire(tmp_path / "new", print)
    server.start()


def test_a_damaged_mirror_does_not_stop_a_run_of_this_host(tmp_path: Path):
    config = make_config(tmp_path, run={"mirror": str(tmp_path / "mirror")})
    (tmp_path / "mirror").mkdir()
    folder = make_run(RunFolder.of(config).path)
    make_copier(folder, Store(f"{tmp_path}/mirror/run")).copy()
    (manifest,) = (tmp_path / "mirror/run/manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes()[:100])
    said: list[str] = []
    fetch_run(config, adopt=None, say=said.append)
    Mirror.of(config).acquire(folder.path, said.append)
    (line,) = said
    assert "to begin a new mirror; the run starts" in line
    folder.path.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"is damaged: .*; restore it from a copy, or delete"):
        fetch_run(config, adopt=None, say=print)


def test_a_store_that_cannot_be_written_stops_a_new_run(
    config: Config, tmp_path: Path, server: S3Server
):
    server.writable = False
    with pytest.raises(ValueError, match=r"^run\.mirror: .* cannot be written: .*Insufficient"):
        Mirror.of(config).acquire(tmp_path / "new", print)


def test_a_store_that_never_answers_does_not_block_the_start():
    with pytest.raises(ValueError, match=r"^url does not answer within 0 s$"):
        mirror_module.answer("url", lambda: asyncio.run(asyncio.Event().wait()), limit_s=0.0)


def test_the_lease_of_a_killed_driver_is_free(config: Config, folder: RunFolder):
    dead = Holder("dead", Holder.here().host, Holder.here().machine, os.getpid(), 1.0)
    Lease(Store(URL), dead).renew()
    with closing(Mirror.of(config)) as mirror:
        mirror.acquire(folder.path, print)
    assert Store(URL).read_lease() is None


@pytest.mark.parametrize("mirror", [".", "run/copies", "run/../run/copies"])
def test_a_copy_does_not_contain_itself(tmp_path: Path, mirror: str):
    run = tmp_path / "run"
    (run / "copies").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"the copy .* and the run folder .* would contain each"):
        mirror_module.check_mirror(str(tmp_path / mirror), run)
    with pytest.raises(ValueError, match="would contain each other"):
        Mirror(f"{tmp_path / mirror}/run").acquire(run, print)
    assert [path.name for path in run.rglob("*")] == ["copies"]
