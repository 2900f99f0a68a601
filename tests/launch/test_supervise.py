"""The parent of a run: what is started again, and what ends; what the run tells it of progress."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from configs.schema import Faults
from launch.exits import EXIT_CLUSTER_LOST, EXIT_DIED, EXIT_FAILED, EXIT_REPORTED
from launch.progress import watched
from launch.supervise import _Supervisor, supervise
from pipeline.budget import used_s
from pipeline.clock import Heartbeat, PhaseClock
from pipeline.protocols import WorkerDied
from pipeline.run.console import Console
from pipeline.run.run_folder import RunFolder
from tests.samples import make_config

Child = Callable[[RunFolder], int]
ARGV = ["demo.toml", "--extend", "1h", "--run.seed=3"]


class Children:
    """Runs of the command, each a function of the folder that returns its exit status.

    Keeps the arguments of each, and the pauses in seconds before each restart.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *children: Child) -> None:
        self.config = make_config(folder)
        self.folder = RunFolder.of(self.config)
        self.argv: list[list[str]] = []
        self.pauses: list[float] = []
        waiting = list(children)

        def run(_: object, argv: Sequence[str], __: Mapping[str, str]) -> int:
            self.argv.append(list(argv))
            return waiting.pop(0)(self.folder)

        pauses = self.pauses

        class Event(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                assert timeout is not None
                pauses.append(timeout)
                return self.is_set()

        monkeypatch.setattr("launch.supervise._Supervisor._run_child", run)
        monkeypatch.setattr("launch.supervise.threading", SimpleNamespace(Event=Event))

    def run(self, **faults: int) -> int:
        try:
            return supervise(ARGV, self.config.model_copy(update={"faults": Faults(**faults)}))
        finally:
            self.folder.close()


def begins(folder: RunFolder) -> None:
    config = make_config(folder.path.parent)
    folder.create(config)
    folder.journal("started")


def killed(folder: RunFolder) -> int:
    begins(folder)
    return -signal.SIGKILL


def ends_with(status: int) -> Child:
    return lambda _: status


def test_what_ends_by_itself_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for status in (0, 2, 130, EXIT_CLUSTER_LOST):
        assert Children(tmp_path, monkeypatch, ends_with(status)).run() == status
    ends = map(ends_with, (EXIT_DIED, EXIT_FAILED, EXIT_REPORTED))
    children = Children(tmp_path, monkeypatch, *ends)
    assert (children.run(), len(children.argv)) == (EXIT_FAILED, 3)


def test_the_time_without_a_process_is_used_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = list[float]()

    def dies(folder: RunFolder) -> int:
        begins(folder)
        folder.record_used_s(100.0)
        os.utime(folder.status, (1000.0, 1000.0))  # the pauses are the time of day
        return -signal.SIGKILL

    def ends(folder: RunFolder) -> int:
        found.append(used_s(folder))
        return 0

    children = Children(tmp_path, monkeypatch, dies, dies, ends)
    clock = SimpleNamespace(monotonic=time.monotonic, time=lambda: 1000.0 + sum(children.pauses))
    monkeypatch.setattr("launch.supervise.time", clock)
    assert children.run() == 0
    assert found == [104.0]  # with the pause before it


def test_deaths_without_a_new_step_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def step(folder: RunFolder) -> int:
        begins(folder)
        folder.write_metrics({"step": len(folder.metrics) + 1})
        return -signal.SIGKILL

    children = Children(tmp_path, monkeypatch, killed, killed, step, killed, killed, killed)
    assert children.run(restarts=2) == EXIT_FAILED
    assert children.pauses == [1.0, 4.0, 1.0, 4.0]
    assert "SIGKILL; this is death 3 without a new training step" in capsys.readouterr().err


def test_an_extension_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def extended(folder: RunFolder) -> int:
        begins(folder)
        folder.journal("extended", steps=None, time_s=3600)
        return -signal.SIGKILL

    children = Children(tmp_path, monkeypatch, killed, extended, ends_with(0))
    assert children.run() == 0
    # What the first process has not journaled is still to be done.
    assert children.argv == [ARGV, ARGV, ["demo.toml", "--run.seed=3"]]


def test_a_signal_is_forwarded_once_and_a_second_ctrl_c_kills(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """test_runs.py has a run that hangs, test_jobs.py one that is stopped in order."""
    sent = list[object]()
    supervisor = _Supervisor(ARGV, make_config(tmp_path))
    child = SimpleNamespace(send_signal=sent.append, kill=lambda: sent.append("kill"))
    supervisor._child = cast("subprocess.Popen[bytes]", child)
    supervisor._on_signal(signal.SIGINT, None)
    supervisor._forward()  # as after a start that the signal interrupted
    for number in (signal.SIGTERM, signal.SIGINT):
        supervisor._on_signal(number, None)
    assert sent == [signal.SIGINT, "kill"]
    assert "stopped at once" in capfd.readouterr().err


@pytest.mark.parametrize(("polls_s", "hung"), [(range(400), True), ((0, 1, 2, 900, 901), False)])
def test_only_time_in_which_the_parent_itself_runs_counts_as_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polls_s: Sequence[int], hung: bool
):
    sent, clock = list[str](), iter(polls_s)
    status = SimpleNamespace(last_status={"pid": 7, "progress": 1, "slow": False}, metrics=())
    waits = iter([1] * (len(polls_s) - 1))

    def wait(timeout: float) -> int:
        if next(waits, None) is not None:
            raise subprocess.TimeoutExpired("", timeout)
        return 0

    supervisor = _Supervisor(ARGV, make_config(tmp_path))
    monkeypatch.setattr(supervisor, "_folder", status)
    monkeypatch.setattr("launch.supervise.time", SimpleNamespace(monotonic=lambda: next(clock)))
    child = SimpleNamespace(pid=7, wait=wait, kill=lambda: sent.append("kill"))
    assert supervisor._wait(cast("subprocess.Popen[bytes]", child)) == 0
    assert bool(sent) == hung


def test_how_long_a_run_may_be_without_progress(tmp_path: Path):
    for faults, rewards, longest_s, limits_s in (
        ({}, {}, 4.0, (300, 1800)),
        ({}, {}, 200.0, (2000, 2000)),
        ({}, {"timeout_s": 200.0}, 4.0, (400, 1800)),
        ({"stuck_s": 10.0}, {}, 200.0, (10, 1800)),
    ):
        config = make_config(tmp_path / str(limits_s), faults=faults, rewards=rewards)
        with closing(RunFolder.of(config)) as folder:
            folder.create(config)
            folder.write_metrics({"step": 1, "time/step_s": longest_s})
        supervisor = _Supervisor(ARGV, config)
        assert (supervisor._stuck_s(slow=False), supervisor._stuck_s(slow=True)) == limits_s


# --- what the process tells its parent about progress


QUIET_S = 1e6


def reported(
    monkeypatch: pytest.MonkeyPatch,
    heartbeat: Callable[[], Awaitable[Heartbeat]],
    *,
    phase: str = "sample",
) -> tuple[bool, bool]:
    """Whether about 50 reports have told progress, and that the run is slow."""
    monkeypatch.setattr("launch.progress._EVERY_S", 0.0)
    phases, console = PhaseClock(lambda: QUIET_S), Console()

    async def work() -> tuple[bool, bool]:
        for _ in range(50):
            await asyncio.sleep(0)
        return console.status.progress > 0, console.status.slow

    with phases.during(phase):
        phases.now = lambda: 2 * QUIET_S
        processes = {"sampler 0": heartbeat}
        return asyncio.run(watched(work(), processes, phases=phases, console=console))


@pytest.mark.parametrize(
    ("beat", "phase", "moves", "slow"),
    [
        (Heartbeat("decode", 0.0), "sample", True, False),
        (Heartbeat("decode", QUIET_S), "sample", False, False),
        (Heartbeat("compile", QUIET_S), "loading", False, True),
        (Heartbeat(), "device_wait", True, False),  # for as long as others hold the devices
    ],
)
def test_the_progress_of_any_process_is_the_runs(
    monkeypatch: pytest.MonkeyPatch, beat: Heartbeat, phase: str, moves: bool, slow: bool
):
    async def heartbeat() -> Heartbeat:
        return beat

    assert reported(monkeypatch, heartbeat, phase=phase) == (moves, slow)


def test_a_process_that_does_not_answer_makes_no_progress_and_a_death_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
):
    async def silent() -> Heartbeat:
        await asyncio.Event().wait()
        raise AssertionError

    assert reported(monkeypatch, silent) == (False, False)

    async def dead() -> Heartbeat:
        raise WorkerDied("sampler 0", "its process ended unexpectedly")

    with pytest.raises(WorkerDied, match=r"^sampler 0: its process ended unexpectedly$"):
        reported(monkeypatch, dead)
