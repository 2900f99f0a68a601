"""W&B: its mode, its data, and isolation of the run from its failures."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.run import tracking
from pipeline.run.tracking import Mode, Tracker, choose_mode
from tests.pipeline.run.wandb_files import read_records, run_files
from tests.pipeline.run.wandb_server import WandbServer, wandb_server
from tests.samples import make_config


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Without a login and short time limits; yields the file that could contain a login."""
    monkeypatch.setattr(tracking, "START_S", 900.0)
    monkeypatch.setattr(tracking, "FINISH_S", 900.0)
    for variable in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_DATA_DIR", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    yield netrc
    # wandb does not wait for a service that was killed, which Python reports when it is collected.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def mode(folder: Path, wanted: str) -> tuple[str, str]:
    return choose_mode(make_config(folder, wandb={"mode": wanted}))


@pytest.mark.parametrize(
    ("wanted", "chosen", "reason"),
    [
        ("auto", "offline", "`wandb login` logs in for later runs"),
        ("offline", "offline", "offline by wandb.mode"),
        ("disabled", "disabled", "disabled by wandb.mode"),
    ],
)
def test_the_mode_without_a_login_and_why(tmp_path: Path, wanted: str, chosen: str, reason: str):
    found, why = mode(tmp_path, wanted)
    assert found == chosen
    assert reason in why
    with pytest.raises(ValueError, match=r"wandb\.mode = 'online', but .* no W&B login.*WANDB_"):
        mode(tmp_path, "online")


def test_a_login_counts_only_for_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: Path
):
    nobody.write_text("machine wandb.example.org login user password k\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert mode(tmp_path, "auto")[0] == "online"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """The fake W&B server, with a login."""
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield server


class Run:
    """A run of a W&B process: the messages sent to it, and its events."""

    def __init__(self, folder: Path, mode: Mode, *, run_id: str | None = None) -> None:
        self.folder = folder
        self.tracker = Tracker(mode, run_id=run_id)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.heard = asyncio.Event()

    def tell(self, event: str, text: str, **facts: Any) -> None:
        assert event == "wandb"
        self.told.append((text, facts))
        self.heard.set()

    async def start(self, rows: Any = ()) -> None:
        config = make_config(self.folder, wandb={"mode": "auto", "project": "p"})
        self.tracker.start(config, folder=self.folder, rows=rows, log_event=self.tell)

    async def hear(self, key: str) -> Any:
        """The next message with `key`."""
        while True:
            found = [facts[key] for _, facts in self.told if key in facts]
            if found:
                return found[-1]
            self.heard.clear()
            await asyncio.wait_for(self.heard.wait(), 300)

    def log(self, *steps: int) -> None:
        for step in steps:
            self.tracker.log({"loss": step / 2}, step=step)


def earlier(*steps: int) -> list[dict[str, float]]:
    """The metrics of steps of an earlier process."""
    return [{"step": step, "loss": step / 2} for step in steps]


@asynccontextmanager
async def begun(folder: Path, mode: Mode = "online", **more: Any) -> AsyncIterator[Run]:
    """A run that W&B has started, online or offline."""
    run = Run(folder, mode)
    with closing(run.tracker):
        await run.start(**more)
        await run.hear("address")
        yield run


def sync(command: str) -> None:
    """Runs the command that the user is told to run later."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:  # wandb writes logs to the working directory
        # W&B prints failed uploads, and ends with status 0.
        subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=os.environ | {"PATH": path},
            stdin=subprocess.DEVNULL,
            check=True,
        )


@pytest.mark.slow
def test_waiting_for_a_hanging_server_is_bounded(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking, "FINISH_S", 8.0)

    async def work() -> Run:
        async with begun(tmp_path) as run:
            run.log(1, 2, 3)
            server.hangs = True
            run.log(4, 5)
            await run.tracker.finish(exit_status=0)
        return run

    text, facts = asyncio.run(work()).told[-1]
    (folder,) = (tmp_path / "wandb").glob("run-*")
    command = f"wandb sync --include-online {folder}"
    assert facts == {"uploaded": False, "sync": command}
    assert text == f"W&B: to upload what is not uploaded of this run: {command}"
    server.hangs = False
    sync(command)
    assert server.steps() == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_an_unresponsive_server_turns_wandb_off_and_the_next_start_sends_what_is_missing(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
):
    async def work(rows: Any, *steps: int, run_id: str | None) -> Run:
        run = Run(tmp_path, "online", run_id=run_id)
        await run.start(rows=rows)
        run.log(*steps)
        assert run.told == []  # the run continued before the start was known
        await run.hear("failed" if server.hangs else "address")
        await run.tracker.finish(exit_status=0)
        return run

    server.hangs = True
    with monkeypatch.context() as short:
        short.setattr(tracking, "START_S", 2.0)
        first = asyncio.run(work([], 1, 2, run_id=None))
    ((text, _),) = first.told
    assert text.startswith("W&B: turned off (")
    server.hangs = False
    asyncio.run(work(earlier(1, 2), 3, run_id=first.tracker.run_id))
    assert server.steps() == [1, 2, 3]


@pytest.mark.slow
def test_a_resumed_run_sends_the_rows_that_wandb_lacks(tmp_path: Path, server: WandbServer):
    server.history = {0: '{"_step": 1, "loss": 0.5}', 1: '{"_step": 2, "loss": 1.0}'}

    async def work() -> None:
        run = Run(tmp_path, "online", run_id="old-id")
        await run.start(rows=earlier(1, 2, 3, 4))
        run.log(5)
        await run.tracker.finish(exit_status=0)
        assert run.tracker.run_id == "old-id"
        assert run.told[0][0].endswith("/runs/old-id")

    asyncio.run(work())
    assert [(row["_step"], row["loss"]) for row in server.rows()] == [
        (1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.5)
    ]  # fmt: skip


async def offline(folder: Path, run_id: str | None, rows: Any, *steps: int) -> Run:
    """A process of a run that is offline."""
    run = Run(folder, "offline", run_id=run_id)
    await run.start(rows=rows)
    run.log(*steps)
    await run.tracker.finish(exit_status=0)
    return run


@pytest.mark.slow
def test_offline_processes_are_uploaded_together_as_one_run(tmp_path: Path, server: WandbServer):
    first = asyncio.run(offline(tmp_path, None, [], 1, 2, 3))
    # It was killed, and repeats step 3.
    second = asyncio.run(offline(tmp_path, first.tracker.run_id, earlier(1, 2), 3, 4))
    text, facts = second.told[-1]
    folder = f"{tmp_path}/wandb/offline-run-*-{first.tracker.run_id}*"
    assert text == f"W&B: to upload what is not uploaded of this run: wandb sync {folder}"
    assert facts == {"uploaded": False, "sync": f"wandb sync {folder}"}
    sync(facts["sync"])
    # The step that was repeated is there twice, with the same values.
    assert sorted(set(server.steps())) == [1, 2, 3, 4]


def test_what_an_offline_run_has_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    async def work() -> Run:
        run = Run(tmp_path, "offline")
        await run.start()
        run.log(1, 2)
        run.tracker.log_evaluation("test", {"eval/test/accuracy": 0.5}, version=1, step=2)
        run.tracker.alert("alarm excluded", "step 2: no rewards", level="ERROR")
        run.log(3)
        run.tracker.summarize({"steps": 3, "eval": {"n": 4, "p": None}})
        await run.tracker.finish(exit_status=130)
        return run

    run = asyncio.run(work())
    assert capfd.readouterr() == ("", "")  # the console is the run's
    run_id = run.tracker.run_id
    assert run_id is not None
    (file,) = run_files(tmp_path, run_id)
    records = read_records(file)

    def of(kind: str) -> list[Any]:
        return [record[kind] for record in records if record["type"] == kind]

    begun = of("run")[0]
    assert (begun["project"], begun["config"]["update"]["run"]["name"]) == ("p", "run")
    rows = [row["item"] for row in of("history")]
    assert [(row["_step"], row["loss"]) for row in rows] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert (rows[1]["eval/test/accuracy"], rows[1]["eval/test/version"]) == (0.5, 1)
    summary = {key: value for one in of("summary") for key, value in one["update"].items()}
    assert {key: summary[key] for key in ("steps", "eval/n", "eval/test/accuracy")} == {
        "steps": 3,
        "eval/n": 4,
        "eval/test/accuracy": 0.5,
    }
    (alert,) = of("alert")
    assert (alert["title"], alert["level"]) == ("alarm excluded", "ERROR")
