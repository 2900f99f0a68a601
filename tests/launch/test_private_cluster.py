"""The private cluster of a command: start, network addresses, and that nothing of it remains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from actors.placement import cluster_is_gone
from launch import private_cluster, reaper
from launch.exits import Failure
from pipeline.run.run_folder import RunFolder
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    family,
    next_line,
    private_environment,
    train_command,
    wait_for_lines,
    write_config,
)
from tests.launch.cluster_fixtures import start as start_process

pytestmark = pytest.mark.slow


class FakeRay:
    """Fails to start a given number of times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.folders: list[Path] = []
        self.marks: list[str | None] = []
        self.token = ""
        self.stopped = 0

    def init(self, *, address: str, include_dashboard: bool, _temp_dir: str, **settings: Any):
        assert (address, include_dashboard) == ("local", False)
        assert settings == {"num_cpus": 3}
        folder = Path(_temp_dir)
        folder.mkdir()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        self.folders.append(folder)
        self.marks.append(os.environ.get(reaper.VARIABLE))
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", ""))
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o600
            self.token = path.read_text()
        if len(self.folders) <= self.failures:
            raise Exception("The node timed out.\nLong story.")

    def shutdown(self) -> None:
        self.stopped += 1


Start = Callable[..., FakeRay]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Starts a fake cluster, runs a body in it, and checks that nothing is left."""
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private_cluster, "_MAX_PARENT_BYTES", len(str(tmp_path)))
    monkeypatch.setattr(private_cluster, "_essential_processes", lambda _: {})

    def started(body: Callable[[FakeRay], None] = lambda _: None, *, failures: int = 0) -> FakeRay:
        fake = FakeRay(failures)
        monkeypatch.setattr(ray, "init", fake.init)
        monkeypatch.setattr(ray, "shutdown", fake.shutdown)
        with private_cluster.private_cluster(num_cpus=3):
            body(fake)
        return fake

    yield started
    assert list(tmp_path.glob("grpo-*")) == []
    assert [
        one for one in psutil.Process().children() if "reaper.py" in " ".join(one.cmdline())
    ] == []


def test_the_cluster_has_a_private_folder_and_a_token_and_is_removed(start: Start, tmp_path: Path):
    def body(fake: FakeRay) -> None:
        assert fake.folders[0].parent.parent == tmp_path
        assert fake.marks == [str(fake.folders[0])]
        assert reaper.VARIABLE not in os.environ  # other children of this process do not have it
        assert fake.stopped == 0

    fake = start(body)
    assert len(fake.token) == 64
    assert fake.stopped == 1
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    # Ray keeps the first token for as long as the process lives.
    assert start().token == fake.token


def test_a_token_of_the_user_is_used(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "mine"
    path.touch(mode=0o600)
    path.write_text("my own")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    assert start().token == "my own"


def test_a_folder_too_long_for_sockets_is_not_used(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    too_long = tmp_path / "1"
    too_long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    (folder,) = start().folders
    assert folder.parent.parent == Path("/tmp")
    assert not folder.parent.exists()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects the pauses between attempts, in seconds."""
    found: list[float] = []
    monkeypatch.setattr(private_cluster, "time", SimpleNamespace(sleep=found.append))
    return found


def test_a_failed_start_is_retried_in_a_new_folder(
    start: Start, pauses: list[float], capsys: pytest.CaptureFixture[str]
):
    def body(fake: FakeRay) -> None:
        assert [folder.exists() for folder in fake.folders] == [False, False, True]

    fake = start(body, failures=2)
    assert len(set(fake.folders)) == 3
    assert pauses == [2.0, 8.0]
    assert fake.stopped == 3
    assert capsys.readouterr().out.splitlines() == [
        f"Ray did not start: The node timed out. Retrying in {pause_s} s" for pause_s in (2, 8)
    ]


def test_a_cluster_that_never_starts_gives_one_sentence(start: Start, pauses: list[float]):
    with pytest.raises(Failure, match=r"^Ray did not start in 3 attempts: The node timed out\. Is"):
        start(failures=3)
    assert len(pauses) == 2


def test_a_process_that_ends_at_once_is_a_failed_start(
    start: Start, pauses: list[float], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="gcs_server or raylet ended at once"):
        private_cluster._essential_processes("/nowhere")


def test_sigterm_while_ray_starts_ends_the_command(start: Start, monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
        start(failures=1)

    ended_by_signal = SimpleNamespace(sleep=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(private_cluster, "time", ended_by_signal)
    with pytest.raises(SystemExit) as ended:
        asyncio.run(run())
    assert ended.value.code == 143


WAITS = "input()"
SHUTS_DOWN = """
import socket
with socket.create_server(("127.0.0.1", 0)):
    print(flush=True)
    input()
input()
"""
"""As a GCS after SIGTERM: it no longer listens, and stays."""


@pytest.mark.parametrize("code", [WAITS, SHUTS_DOWN])
def test_the_end_of_ray_cancels_the_body(start: Start, monkeypatch: pytest.MonkeyPatch, code: str):
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pipe = process.stdin
    assert pipe is not None
    assert process.stdout is not None
    if code == SHUTS_DOWN:
        process.stdout.readline()
    monkeypatch.setattr(private_cluster, "_essential_processes", lambda _: {"raylet": process.pid})
    monkeypatch.setattr(ray, "init", FakeRay(0).init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    async def forever() -> None:
        # Entered within the loop's task, which is cancelled.
        with private_cluster.private_cluster(num_cpus=3):
            if code == WAITS:
                process.kill()
            else:
                pipe.write("\n")
                pipe.flush()
            await asyncio.Event().wait()

    message = rf"^Ray's process raylet \(pid {process.pid}\) ended unexpectedly"
    with pytest.raises(Failure, match=message):
        asyncio.run(forever())
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_the_end_of_ray_does_not_change_a_result(start: Start, monkeypatch: pytest.MonkeyPatch):
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE)
    monkeypatch.setattr(private_cluster, "_essential_processes", lambda _: {"gcs": process.pid})
    monkeypatch.setattr(ray, "init", FakeRay(0).init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    async def finish() -> None:
        with private_cluster.private_cluster(num_cpus=3) as watch:
            watch.finish()
            process.kill()
            assert cluster_is_gone.wait(PATIENCE_S)
        await asyncio.sleep(0)  # an upload, for example

    asyncio.run(finish())
    process.communicate()


IDLE = "print(flush=True); input()"
WRITES = f"import sys; file = open(sys.argv[1], sys.argv[2]); {IDLE}"


def idle(*arguments: str, mark: str | None = None) -> subprocess.Popen[str]:
    """Starts a process that runs until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        env=os.environ | ({} if mark is None else {reaper.VARIABLE: mark}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_the_reaper_ends_the_cluster_of_its_folder_and_no_other(tmp_path: Path):
    mine, other = tmp_path / "0", tmp_path / "00"
    for folder in (mine, other):
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "file").touch()
    ends = [
        idle(IDLE, mark=str(mine)),
        idle(WRITES, str(mine / "logs" / "file"), "a"),
    ]
    stays = [
        idle(IDLE),
        idle(IDLE, mark=str(other)),
        idle(WRITES, str(other / "logs" / "file"), "a"),
        idle(WRITES, str(mine / "logs" / "file"), "r"),
    ]
    driver = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).pid; "
    command = [sys.executable, "-P", reaper.__file__, str(mine)]
    with idle(driver + IDLE, *command) as killed:
        reapers = psutil.Process(killed.pid).children()
        killed.kill()
    gone, alive = psutil.wait_procs(reapers, timeout=PATIENCE_S)
    assert len(gone) == 1
    assert not alive
    for process in ends:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGKILL
    for process in stays:
        assert process.poll() is None
        process.communicate()


# --- real clusters


BARE = """
import asyncio, sys
from launch.exits import Failure
from launch.private_cluster import private_cluster

async def wait():
    with private_cluster(num_cpus=1, log_to_driver=False, object_store_memory=2**27):
        print("started", flush=True)
        await asyncio.Event().wait()

try:
    asyncio.run(wait())
except Failure as failure:
    sys.exit(str(failure))
"""
"""A command that does nothing on its cluster."""


def cluster_of(process: subprocess.Popen[str]) -> tuple[Path, list[psutil.Process]]:
    """Returns the cluster's folder and all processes of a command."""
    processes = family(process.pid)
    commands = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):  # Ray starts short-lived helpers
            commands.append(one.cmdline())
    (folder,) = (Path(line[-1]) for line in commands if reaper.__file__ in line)
    return folder, processes


def kill(process: subprocess.Popen[str], victim: str) -> tuple[str, Path]:
    """Kills a process of a command and its cluster; checks that nothing of them remains.

    Returns:
        The command's output and the cluster's folder.
    """
    folder, processes = cluster_of(process)
    assert {"raylet", "gcs_server"} <= {one.name() for one in processes}
    if victim == "driver":
        process.kill()
    else:
        next(one for one in processes if one.name() == victim).kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []
    assert reaper.processes(str(folder)) == []
    return output, folder


@pytest.mark.ray
@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("victim", ["driver", "gcs_server"])
def test_nothing_remains_of_a_command_whose_ray_or_driver_is_killed(victim: str):
    process = start_process([sys.executable, "-c", BARE], private_environment())
    next_line(process, "started")
    output, folder = kill(process, victim)
    if victim != "driver":
        assert process.returncode == 1
        assert output.startswith(f"Ray's process {victim} (pid ")
        assert not folder.parent.exists()


def is_open(process: psutil.Process) -> list[str]:
    """Returns addresses other than loopback that a process listens on."""
    connections: list[Any] = []
    with suppress(psutil.NoSuchProcess):
        connections = process.net_connections("inet")
    return [
        f"{process.pid}: {one.laddr}"
        for one in connections
        if one.status == psutil.CONN_LISTEN
        and one.laddr.ip not in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    ]


@pytest.mark.ray
@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_run_is_private_and_reports_the_end_of_its_raylet(tmp_path: Path):
    config = write_config(tmp_path, name="killed")
    process = start_process(train_command(config, "--budget.steps=500"), private_environment())
    run = tmp_path / "runs" / "killed"
    wait_for_lines(run / "metrics.jsonl", 1, process)
    folder, processes = cluster_of(process)
    assert [line for one in processes for line in is_open(one)] == []
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert (folder.parent / "token").stat().st_mode & 0o777 == 0o600
    output, _ = kill(process, "raylet")
    assert process.returncode == 75
    last = output.splitlines()[-1]
    assert last.startswith("Ray's process raylet (pid ")
    assert last.endswith("the same command resumes the run from its last checkpoint")
    assert "Traceback" not in output
    assert "state-dump" not in output
    assert not folder.parent.exists()
    assert last in [entry["error"] for entry in RunFolder(run).events("failed")]
