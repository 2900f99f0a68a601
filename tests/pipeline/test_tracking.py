"""W&B: what it runs as, and that whatever it does no run ends of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from pipeline.tracking import Tracker, choose_mode
from tests.fakes import make_config


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody is logged in; the path of the file that would say otherwise."""
    for variable in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    return netrc


def mode(folder: Path, wanted: str) -> tuple[str, str]:
    return choose_mode(make_config(folder, wandb={"mode": wanted}))


def test_nobody_is_logged_in(tmp_path: Path):
    chosen, why = mode(tmp_path, "auto")
    assert chosen == "offline"
    assert "nobody is logged in; `wandb login` mends it, `wandb sync` uploads" in why


@pytest.mark.parametrize("wanted", ["offline", "disabled"])
def test_what_was_asked_for_is_done_and_said(tmp_path: Path, wanted: str):
    chosen, why = mode(tmp_path, wanted)
    assert chosen == wanted
    assert f"{wanted} by wandb.mode" in why


def test_online_on_demand_is_refused_where_nobody_is_logged_in(tmp_path: Path):
    with pytest.raises(ValueError, match=r"wandb\.mode = 'online' but nobody is logged in.*WANDB_"):
        mode(tmp_path, "online")


@pytest.mark.parametrize("wanted", ["auto", "online"])
def test_a_key_in_the_environment_is_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert mode(tmp_path, wanted) == ("online", "W&B: online")


def test_a_login_is_one_at_the_server_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: Path
):
    nobody.write_text("machine wandb.example.org login user password k\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert mode(tmp_path, "auto")[0] == "online"
    monkeypatch.delenv("WANDB_BASE_URL")
    nobody.write_text("machine api.wandb.ai login user password k\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "online"


def test_a_netrc_that_cannot_be_read_is_no_login(tmp_path: Path, nobody: Path):
    nobody.write_text("machine\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "offline"


class Wandb:
    """What Tracker uses of wandb, with failures where they are wanted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.ended: list[tuple[str, int | None]] = []
        self.failing: dict[str, Callable[..., Exception]] = {}
        monkeypatch.setattr(wandb, "init", self.init)
        monkeypatch.setattr(wandb, "teardown", self.teardown)

    def teardown(self, exit_code: int | None = None) -> None:
        self.ended.append(("teardown", exit_code))

    def fail(self, what: str) -> None:
        if what in self.failing:
            raise self.failing[what](f"{what} failed\nwith details")

    def init(self, **settings: Any) -> SimpleNamespace:
        self.inits.append(settings)
        self.fail(settings["mode"])
        online = settings["mode"] == "online"
        return SimpleNamespace(
            id=settings["id"] or "fresh-id",
            url="https://wandb.ai/run" if online else None,
            dir=str(settings["dir"] / "wandb" / "run-1" / "files"),
            log=self.log,
            summary=SimpleNamespace(update=self.update),
            finish=self.finish,
        )

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        self.fail("log")
        self.logged.append((step, dict(metrics)))

    def update(self, summary: Mapping[str, Any]) -> None:
        self.fail("summary")
        self.summary.update(summary)

    def finish(self, exit_code: int) -> None:
        self.fail("finish")
        self.ended.append(("finish", exit_code))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    return Wandb(monkeypatch)


def track(folder: Path, mode: Any = "online", run_id: str | None = None) -> Tracker:
    config = make_config(folder, wandb={"mode": "auto", "project": "p", "entity": "e"})
    return Tracker(config, mode=mode, folder=folder, run_id=run_id)


def test_everything_is_sent(tmp_path: Path, fake: Wandb):
    tracker = track(tmp_path)
    tracker.log({"loss": 1.0}, step=3)
    tracker.summarize({"steps": 3})
    tracker.finish(exit_status=130)
    assert fake.logged == [(3, {"loss": 1.0})]
    assert fake.summary == {"steps": 3}
    # The second waits for the first, which offline does not.
    assert fake.ended == [("finish", 130), ("teardown", 130)]
    assert (tracker.run_id, tracker.address) == ("fresh-id", "https://wandb.ai/run")
    (given,) = fake.inits
    assert (given["project"], given["entity"], given["name"]) == ("p", "e", "run")
    assert given["config"]["learner"]["lr"] == 1e-5
    assert given["id"] is None


@pytest.mark.parametrize(("mode", "resume"), [("online", "allow"), ("offline", None)])
def test_a_resumed_run_keeps_its_id(tmp_path: Path, fake: Wandb, mode: str, resume: str | None):
    assert track(tmp_path, mode, "old-id").run_id == "old-id"
    assert (fake.inits[0]["id"], fake.inits[0]["resume"]) == ("old-id", resume)


def test_offline_the_address_is_the_folder_to_upload(tmp_path: Path, fake: Wandb):
    assert track(tmp_path, "offline").address == str(tmp_path / "wandb" / "run-1")


def test_a_start_that_fails_online_goes_on_offline(
    tmp_path: Path, fake: Wandb, caplog: pytest.LogCaptureFixture
):
    fake.failing["online"] = wandb.errors.CommError
    tracker = track(tmp_path, run_id="old-id")
    tracker.log({"loss": 1.0}, step=3)
    assert [given["mode"] for given in fake.inits] == ["online", "offline"]
    assert fake.logged == [(3, {"loss": 1.0})]
    assert tracker.run_id == "old-id"
    assert "W&B: cannot start online (online failed)" in caplog.text


def test_a_start_that_fails_altogether_ends_nothing(
    tmp_path: Path, fake: Wandb, caplog: pytest.LogCaptureFixture
):
    fake.failing.update(online=OSError, offline=RuntimeError)
    tracker = track(tmp_path)
    tracker.log({"loss": 1.0}, step=3)
    tracker.summarize({})
    tracker.finish(exit_status=0)
    assert (fake.logged, fake.ended) == ([], [])
    assert (tracker.run_id, tracker.address) == (None, "no address")
    assert "cannot start offline" in caplog.text


@pytest.mark.parametrize("what", ["log", "summary", "finish"])
def test_a_failure_on_the_way_is_told_once_and_ends_nothing(
    tmp_path: Path, fake: Wandb, caplog: pytest.LogCaptureFixture, what: str
):
    fake.failing[what] = ConnectionError
    tracker = track(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tracker.log({"loss": 1.0}, step=3)
            tracker.summarize({"steps": 3})
        for _ in range(2):
            tracker.finish(exit_status=1)
    told = [record.message for record in caplog.records]
    assert told == [f"W&B: gave up ({what} failed); metrics.jsonl has everything"]
    assert len(fake.logged) == {"log": 0, "summary": 1, "finish": 2}[what]


def test_disabled_asks_nothing_of_wandb(tmp_path: Path, fake: Wandb):
    tracker = track(tmp_path, "disabled")
    tracker.log({"loss": 1.0}, step=3)
    tracker.finish(exit_status=0)
    assert (fake.inits, fake.logged, tracker.run_id) == ([], [], None)


def test_a_real_offline_run_in_the_run_folder(tmp_path: Path):
    tracker = track(tmp_path, "offline", "kept-id")
    tracker.log({"reward/mean": 0.5}, step=1)
    tracker.summarize({"steps": 1, "eval": {"before": {"accuracy": 0.25}}})
    tracker.finish(exit_status=0)
    address = Path(tracker.address)
    assert address.parent == tmp_path / "wandb"
    (written,) = address.glob("*.wandb")
    assert written.name == "run-kept-id.wandb"
    assert b"reward/mean" in written.read_bytes()
