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

import psutil
import pytest

from pipeline.run import tracking, wandb_run
from pipeline.run.tracking import (
    Message,
    Mode,
    Tracker,
    choose_mode,
    step_message,
)
from tests.pipeline.run.wandb_files import read_records, run_files
from tests.pipeline.run.wandb_server import Fault, WandbServer, wandb_server
from tests.samples import make_config

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Without a login; yields the path of the file that could contain one."""
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


def test_without_a_login_wandb_is_offline(tmp_path: Path):
    chosen, why = mode(tmp_path, "auto")
    assert chosen == "offline"
    assert why.endswith("there is no W&B login; `wandb login` logs in for later runs")


@pytest.mark.parametrize("wanted", ["offline", "disabled"])
def test_a_configured_mode_is_used_and_reported(tmp_path: Path, wanted: str):
    chosen, why = mode(tmp_path, wanted)
    assert chosen == wanted
    assert f"{wanted} by wandb.mode" in why


def test_configured_online_mode_without_a_login_is_refused(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"wandb\.mode = 'online', but this machine has no W&B login.*WANDB_"
    ):
        mode(tmp_path, "online")


@pytest.mark.parametrize("wanted", ["auto", "online"])
def test_a_key_in_the_environment_is_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert mode(tmp_path, wanted) == ("online", "W&B: online")


def test_a_login_counts_only_for_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: Path
):
    nobody.write_text("machine wandb.example.org login user password k\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert mode(tmp_path, "auto")[0] == "online"
    monkeypatch.delenv("WANDB_BASE_URL")
    nobody.write_text("machine api.wandb.ai login user password k\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "online"


def test_an_unreadable_netrc_is_no_login(tmp_path: Path, nobody: Path):
    nobody.write_text("machine\n", encoding="utf-8")
    assert mode(tmp_path, "auto")[0] == "offline"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """The fake W&B server for all tests; without time limits that tests could hit."""
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        monkeypatch.setattr(tracking, "START_S", 900.0)
        monkeypatch.setattr(tracking, "FINISH_S", 900.0)
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


def earlier(*steps: int) -> list[Message]:
    """The messages of steps of an earlier process."""
    return [step_message({"loss": step / 2}, step=step, rollouts=None) for step in steps]


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


def test_everything_is_sent(tmp_path: Path, server: WandbServer):
    async def work() -> None:
        async with begun(tmp_path) as run:
            run.log(1, 2)
            run.tracker.log_evaluation("test", {"eval/test/accuracy": 0.5}, version=1, step=2)
            run.tracker.alert("alarm excluded", "step 2: no rewards", level="ERROR")
            run.tracker.alert("alarm all_equal", "step 2: no signal", level="WARN")
            run.log(3)
            run.tracker.summarize({"steps": 3})
            await run.tracker.finish(exit_status=130)
        ((text, facts),) = run.told
        assert text == f"W&B: {server.url}/somebody/p/runs/{run.tracker.run_id}"
        assert facts["address"] == text.removeprefix("W&B: ")

    asyncio.run(work())
    assert [(row["_step"], row["loss"]) for row in server.rows()] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert server.rows()[1]["eval/test/accuracy"] == 0.5
    assert server.rows()[1]["eval/test/version"] == 1
    assert server.alerts == [
        ("ERROR", "alarm excluded", "step 2: no rewards"),
        ("WARN", "alarm all_equal", "step 2: no signal"),
    ]
    assert server.exit_status == 130


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "500"])
def test_waiting_for_a_failing_server_is_bounded(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch, fault: Fault
):
    monkeypatch.setattr(tracking, "FINISH_S", 8.0)

    async def work() -> Run:
        async with begun(tmp_path) as run:
            run.log(1, 2, 3)
            server.fault = fault
            run.log(4, 5)
            await run.tracker.finish(exit_status=0)
        return run

    text, facts = asyncio.run(work()).told[-1]
    (folder,) = (tmp_path / "wandb").glob("run-*")
    command = f"wandb sync --include-online {folder}"
    assert facts == {"uploaded": False, "sync": command}
    assert text == f"W&B: the upload of this run is incomplete after 8 s; to upload it: {command}"
    server.fault = None
    sync(command)
    assert server.steps() == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_an_unresponsive_server_does_not_delay_the_start(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wandb_run, "START_S", 2.0)
    server.fault = "hang"

    async def work() -> Run:
        run = Run(tmp_path, "online")
        await run.start(rows=earlier(1))
        run.log(2, 3)
        assert run.told == []  # the run continued before the start was known
        assert "cannot start online (" in await run.hear("failed")
        await run.hear("address")
        run.log(4)
        await run.tracker.finish(exit_status=0)
        return run

    facts = asyncio.run(work()).told[-1][1]
    assert facts["sync"].startswith(f"wandb sync {tmp_path}/wandb/offline-run-*-")
    server.fault = None
    sync(facts["sync"])
    assert server.steps() == [1, 2, 3, 4]


def services() -> list[psutil.Process]:
    """W&B's services of this process."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "wandb-core" in child.name()]


@pytest.mark.slow
def test_a_dead_service_turns_wandb_off(tmp_path: Path, server: WandbServer):
    async def work() -> Run:
        async with begun(tmp_path) as run:
            run.log(1, 2)
            for process in services():
                process.kill()
            run.log(3, 4)
            await asyncio.wait_for(run.hear("failed"), 120)
            run.log(5)
            await run.tracker.finish(exit_status=0)
        return run

    told = asyncio.run(work()).told
    assert [next(iter(facts)) for _, facts in told] == ["address", "failed", "uploaded"]
    assert told[1][0].startswith("W&B: turned off (")
    assert "to upload it: wandb sync --include-online" in told[2][0]


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
    assert text == f"W&B: to upload this run: wandb sync {folder}"
    assert facts == {"uploaded": False, "sync": f"wandb sync {folder}"}
    sync(facts["sync"])
    # The step that was repeated is there twice, with the same values.
    assert sorted(set(server.steps())) == [1, 2, 3, 4]


@pytest.mark.slow
def test_an_evaluation_after_a_resume_reaches_the_server(tmp_path: Path, server: WandbServer):
    """The first process is stopped between the second step and its validation."""

    async def work(run_id: str | None, rows: Any, evaluated: int, *steps: int) -> str:
        run = Run(tmp_path, "online", run_id=run_id)
        await run.start(rows=rows)
        accuracy = {"eval/validation/accuracy": evaluated / 10}
        run.tracker.log_evaluation("validation", accuracy, version=evaluated, step=evaluated)
        run.tracker.summarize({"eval/validation/accuracy": 0.2, "best": {"step": 2}})
        run.log(*steps)
        await run.tracker.finish(exit_status=0)
        assert run.tracker.run_id is not None
        return run.tracker.run_id

    run_id = asyncio.run(work(None, [], 0, 1, 2))
    asyncio.run(work(run_id, earlier(1, 2), 2, 3))
    rows = [
        (row["_step"], row.get("step"), row.get("eval/validation/version")) for row in server.rows()
    ]
    assert rows == [(0, None, 0), (1, 1, None), (2, 2, None), (3, 3, 2)]
    assert server.summary["eval/validation/accuracy"] == 0.2
    assert server.summary["best/step"] == 2
    assert server.summary["step"] == 3


def test_of_an_export_all_but_merged_weights_is_uploaded(tmp_path: Path):
    export = tmp_path / "export"
    (export / "adapter").mkdir(parents=True)
    for name, size in (("model.bin", 65), ("adapter/model.bin", 65), ("README.md", 1)):
        with (export / name).open("wb") as opened:
            opened.truncate(size * 2**20)

    async def work() -> Run:
        run = Run(tmp_path, "offline")
        await run.start()
        for folder in ("export", "export", "gone"):
            run.tracker.log_artifact("export", tmp_path / folder, metadata={"version": 3})
        await run.tracker.finish(exit_status=0)
        return run

    run = asyncio.run(work())
    run_id = run.tracker.run_id
    assert run_id is not None
    name = f"export-{run_id}"
    assert [text for text, facts in run.told if "artifact" in facts or "failed" in facts] == [
        f"W&B: artifact {name}: 2 files, 66.0 MiB; not uploaded, only referenced: model.bin",
        f"W&B: {name} is not uploaded ({tmp_path}/gone is not on this host)",
    ]
    (file,) = run_files(tmp_path, run_id)
    (logged,) = (one["artifact"] for one in read_records(file) if one["type"] == "artifact")
    contents = {one["path"]: one for one in logged["manifest"]["contents"]}
    assert contents["model.bin"]["ref"] == (export / "model.bin").as_uri()
    kept = Path(contents["adapter/model.bin"]["local_path"])
    assert kept.is_relative_to(tmp_path / "wandb")
    assert kept.stat().st_size == 65 * 2**20


PROGRAM = """
import asyncio, sys
from pathlib import Path
from pipeline.run import tracking
from tests.samples import make_config

tracking.FINISH_S = 0.1

async def work():
    folder, begun = Path(sys.argv[1]), asyncio.Event()
    tracker = tracking.Tracker("online", run_id=None)
    tracker.start(
        make_config(folder), folder=folder, rows=(), log_event=lambda *_, **facts: begun.set()
    )
    await begun.wait()
    tracker.log({"loss": 0.5}, step=1)
    print("logged", flush=True)
    sys.stdin.readline()
    await tracker.finish(exit_status=0)

asyncio.run(work())
"""


@pytest.mark.slow
def test_python_exits_cleanly_with_a_hanging_server(tmp_path: Path, server: WandbServer):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "logged\n"
    server.fault = "hang"
    assert process.communicate("\n", timeout=300)[0] == ""
    assert process.returncode == 0


def test_disabled_starts_nothing(tmp_path: Path):
    async def work() -> Run:
        run = Run(tmp_path, "disabled")
        await run.start()
        run.log(1)
        run.tracker.summarize({"steps": 1})
        await run.tracker.finish(exit_status=0)
        return run

    run = asyncio.run(work())
    assert (run.told, run.tracker.run_id) == ([], None)
    assert list(tmp_path.iterdir()) == []
