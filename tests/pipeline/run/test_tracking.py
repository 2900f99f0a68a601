"""W&B: its mode, its data, and isolation of the run from its failures."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.run import tracking
from pipeline.run.tracking import Mode, Tracker, choose_mode
from tests.samples import make_config


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without a login; returns the file that could contain one."""
    for variable in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_DATA_DIR", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    return netrc


def mode(folder: Path, wanted: str) -> tuple[str, str]:
    return choose_mode(make_config(folder, wandb={"mode": wanted}))


@pytest.mark.parametrize(
    ("wanted", "chosen"), [("auto", "offline"), ("offline", "offline"), ("disabled", "disabled")]
)
def test_the_mode_without_a_login(tmp_path: Path, wanted: str, chosen: str):
    assert mode(tmp_path, wanted)[0] == chosen
    with pytest.raises(ValueError, match=r"wandb\.mode = 'online', but .* no W&B login.*WANDB_"):
        mode(tmp_path, "online")


def test_a_login_counts_only_for_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: Path
):
    nobody.write_text("machine wandb.example.org login user password k\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert mode(tmp_path, "auto")[0] == "online"


class Run:
    """A run of a process with W&B: its tracker, and the messages sent to it."""

    def __init__(self, folder: Path, mode: Mode, *, run_id: str | None = None) -> None:
        self.folder = folder
        self.tracker = Tracker(mode, run_id=run_id)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.heard = asyncio.Event()

    async def start(self, *earlier: int) -> None:
        def tell(event: str, text: str, **facts: Any) -> None:
            assert event == "wandb"
            self.told.append((text, facts))
            self.heard.set()

        config = make_config(self.folder, wandb={"mode": "auto", "project": "p"})
        rows = [{"step": step, "loss": step / 2} for step in earlier]
        self.tracker.start(config, folder=self.folder, rows=rows, log_event=tell)

    def log(self, *steps: int) -> None:
        for step in steps:
            self.tracker.log({"loss": step / 2}, step=step)


class Wandb:
    """The library with a server that has the rows before `step`, and may fail or hang."""

    def __init__(self, *, step: int = 0, fails: str = "") -> None:
        self.step, self.fails = step, fails
        self.rows: list[tuple[int, float]] = []
        self.alerts: list[str] = []
        self.hangs = threading.Event()
        self.offline, self.url, self.dir = False, "https://wandb.example.org/r", "wandb/run-1/files"
        self.Settings = SimpleNamespace

    def init(self, *, mode: str, **_: Any) -> Wandb:
        self._fail_in("init")
        self._fail_in(f"init {mode}")
        self.offline = mode == "offline"
        return self

    def log(self, row: dict[str, float], *, step: int) -> None:
        self._fail_in("log")
        self.rows.append((step, row["loss"]))
        self.step = step + 1

    def alert(self, *, title: str, **_: Any) -> None:
        self.alerts.append(title)

    def finish(self, **_: Any) -> None:
        self._fail_in("finish")
        if self.fails == "hangs":
            self.hangs.wait()

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def teardown(self, *_: Any) -> None:
        pass

    def _fail_in(self, call: str) -> None:
        if self.fails == call:
            raise OSError(f"{call} failed\nat length")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replaces the library."""
    given: list[Wandb] = []

    def install(**how: Any) -> Wandb:
        given.append(Wandb(**how))
        monkeypatch.setitem(sys.modules, "wandb", given[-1])
        return given[-1]

    yield install
    for one in given:
        one.hangs.set()


async def online(folder: Path, *earlier: int, log: tuple[int, ...], run_id: str | None) -> Run:
    run = Run(folder, "online", run_id=run_id)
    await run.start(*earlier)
    run.log(*log)
    run.tracker.alert("alarm excluded", "step 2: no rewards", level="ERROR")
    await run.tracker.finish(exit_status=0)
    return run


def test_a_resumed_run_sends_the_rows_that_wandb_lacks(tmp_path: Path, installed: Any):
    wandb = installed(step=3)
    run = asyncio.run(online(tmp_path, 1, 2, 3, 4, log=(5,), run_id="old"))
    assert wandb.rows == [(3, 1.5), (4, 2.0), (5, 2.5)]
    assert wandb.alerts == ["alarm excluded"]
    assert run.tracker.run_id == "old"
    assert [text for text, _ in run.told] == ["W&B: https://wandb.example.org/r"]


def test_a_server_that_does_not_answer_makes_the_run_offline(tmp_path: Path, installed: Any):
    wandb = installed(fails="init online")
    run = asyncio.run(online(tmp_path, 1, log=(2,), run_id=None))
    assert wandb.rows == [(1, 0.5), (2, 1.0)]
    assert wandb.alerts == ["alarm excluded"]
    first, _, last = run.told
    assert first[0] == "W&B: cannot start online (init online failed); it is offline"
    sync = f"wandb sync wandb/offline-run-*-{run.tracker.run_id}*"
    assert last == (
        f"W&B: to upload what is not uploaded of this run: {sync}",
        {"uploaded": False, "sync": sync},
    )


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_an_error_turns_wandb_off_with_one_line(tmp_path: Path, installed: Any, call: str):
    installed(fails=call)
    run = asyncio.run(online(tmp_path, log=(1, 2), run_id=None))
    *_, failed = (text for text, facts in run.told if "failed" in facts)
    assert failed == f"W&B: turned off ({call} failed); metrics.jsonl is complete"
    told = [text for text, facts in run.told if "uploaded" in facts]
    assert ["wandb sync --include-online" in text for text in told] == [True] * (call != "init")


def test_the_last_upload_has_a_time_limit(
    tmp_path: Path, installed: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking, "FINISH_S", 0.1)
    installed(fails="hangs")

    async def work() -> Run:
        run = Run(tmp_path, "online")
        await run.start()
        await run.heard.wait()
        await run.tracker.finish(exit_status=0)
        return run

    text, facts = asyncio.run(work()).told[-1]
    command = "wandb sync --include-online wandb/run-1"
    assert text == f"W&B: to upload what is not uploaded of this run: {command}"
    assert facts == {"uploaded": False, "sync": command}
