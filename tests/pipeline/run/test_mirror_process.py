"""The process that copies: a store that is slow, full or gone never affects the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.mirror_lease import LAPSE_S, Holder, Lease, LeaseLostError
from pipeline.run.mirror_process import LOOK_EVERY_S, SLOW_S, Service
from pipeline.run.mirror_store import Store
from pipeline.run.run_folder import RunFolder
from tests.damage import fill_disk
from tests.fakes import FakeClock
from tests.pipeline.run.mirror_parts import content, fetched, make_copier, make_run, train
from tests.pipeline.run.s3_server import BUCKET, S3Server, s3_server

pytestmark = pytest.mark.slow

URL = f"s3://{BUCKET}/runs/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as running:
        yield running


class Finish(threading.Event):
    """The end of the run, after some pauses of the service with an action in each."""

    def __init__(self, clock: FakeClock, *actions: Callable[[], Any]) -> None:
        super().__init__()
        self.clock, self.actions, self.paused = clock, list(actions), list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.paused.append(timeout)
        self.clock.seconds += timeout
        if self.actions:
            self.actions.pop(0)()
        else:
            self.set()
        return self.is_set()


class Setting:
    """A run folder, its mirror and what the service sends."""

    def __init__(self, folder: Path) -> None:
        self.run, self.clock = make_run(folder / "run"), FakeClock()
        self.store, self.folder = Store(URL), folder
        self.sent: list[dict[str, Any]] = []
        self.lease = Lease(self.store, Holder.here(), now=self.clock, wait=lambda _: None)
        self.service = Service(
            make_copier(self.run, self.store, guard=self.lease.renew),
            self.lease,
            lambda **message: self.sent.append(message),
            now=self.clock,
            sleep=lambda _: None,
        )

    def serve(self, *actions: Callable[[], Any]) -> Finish:
        finish = Finish(self.clock, *actions)
        self.service.run(finish)
        return finish

    def told(self) -> list[str]:
        """What the run is told, besides copies."""
        usual = {"copied", "current", "left"}
        return [kind for message in self.sent for kind in message if kind not in usual]

    @property
    def mirrored(self) -> dict[str, bytes] | None:
        return fetched(Store(URL), self.folder / "there")


@pytest.fixture
def setting(tmp_path: Path, server: S3Server) -> Setting:
    return Setting(tmp_path)


def steps(run: RunFolder, *numbers: int) -> list[Callable[[], None]]:
    return [lambda step=number: train(run, step) for number in numbers]  # type: ignore[misc]


def test_each_state_is_copied_and_the_last_one(setting: Setting):
    finish = setting.serve(*steps(setting.run, 2, 3), lambda: None)
    assert setting.mirrored == content(setting.run.path)
    copied = [message["copied"] for message in setting.sent if "copied" in message]
    assert [one["checkpoint"] for one in copied] == [1, 2, 3]
    assert setting.sent[-1] == {"current": True}
    assert finish.paused == [LOOK_EVERY_S] * 4


def test_a_full_store_is_reported_once_and_when_it_works_again(setting: Setting, server: S3Server):
    def full() -> None:
        server.writable = False
        train(setting.run, 2)

    def works() -> None:
        server.writable = True

    finish = setting.serve(full, *steps(setting.run, 3, 4), works, lambda: None)
    assert setting.told() == ["failed", "works"]
    assert "Insufficient Storage" in next(m["failed"] for m in setting.sent if "failed" in m)
    assert finish.paused == [5, 10, 20, 40, 5, 5]
    assert setting.mirrored == content(setting.run.path)


def test_a_run_folder_on_a_full_disk_is_reported_once_and_when_it_is_copied_again(
    small_disk: Path, tmp_path: Path, server: S3Server
):
    setting, ballast = Setting(small_disk), list[Path]()
    setting.folder = tmp_path

    def full() -> None:
        train(setting.run, 2)
        ballast.append(fill_disk(small_disk))

    def room() -> None:
        ballast[0].unlink()

    setting.serve(full, lambda: None, room, lambda: None)
    assert setting.told() == ["failed", "works"]
    failed = next(message["failed"] for message in setting.sent if "failed" in message)
    assert "No space left on device" in failed
    assert setting.mirrored == content(setting.run.path)


def test_a_store_that_is_gone_is_reported_once_and_when_it_is_back(
    setting: Setting, server: S3Server
):
    def gone() -> None:
        server.stop()
        train(setting.run, 2)

    setting.serve(gone, *steps(setting.run, 3), server.start, *steps(setting.run, 4))
    assert setting.told() == ["failed", "works"]
    assert setting.mirrored == content(setting.run.path)


def test_at_the_end_it_is_tried_until_the_run_does_not_wait_any_longer(
    setting: Setting, server: S3Server
):
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            server.writable = True

    setting.service._sleep = sleep
    server.writable = False
    finish = Finish(setting.clock)
    finish.set()
    setting.service.run(finish)
    assert (waits, finish.paused) == ([10, 20, 40], [])
    assert setting.told() == ["failed", "works"]


def test_a_slow_copy_is_reported_once(setting: Setting, server: S3Server):
    beats = iter(range(3))

    def slow(path: str) -> None:
        if "/files/" in path and next(beats, None) is not None:
            setting.clock.seconds += SLOW_S
            setting.service.beat()

    server.on_write = slow
    setting.serve()
    assert setting.told() == ["failed", "works"]
    told = next(message["failed"] for message in setting.sent if "failed" in message)
    assert told.startswith("is slow: a copy has taken 300 s so far, ")


def test_the_lease_is_renewed_while_a_copy_takes_long(setting: Setting, server: S3Server):
    theirs = Lease(setting.store, Holder("theirs", "far", "", 7, 0.0), now=setting.clock)
    beats = iter(range(20))

    def slow(path: str) -> None:
        if "/files/" in path and next(beats, None) is not None:
            for _ in range(10):
                setting.clock.seconds += LAPSE_S / 10
                setting.service.beat()

    server.on_write = slow
    setting.lease.renew()
    setting.serve()
    with pytest.raises(LeaseLostError):
        theirs.renew()


def test_a_process_that_was_overtaken_publishes_nothing(setting: Setting, server: S3Server):
    theirs = Lease(setting.store, Holder("theirs", "far", "", 7, 0.0), now=setting.clock)

    def overtake(path: str) -> None:
        if "/files/" in path:
            server.on_write = lambda _: None
            setting.clock.seconds += LAPSE_S
            theirs.renew()

    setting.lease.renew()
    server.on_write = overtake
    with pytest.raises(LeaseLostError, match="on host far"):
        setting.serve()
    assert setting.store.newest() is None
    with pytest.raises(LeaseLostError):
        setting.service.beat()
