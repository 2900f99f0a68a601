"""One process's part of a run, with fakes for its actors: resume, records, signals, exit status."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import closing
from math import nan
from pathlib import Path
from typing import Any, cast

import pytest

from actors.groups import RunActors
from configs.schema import Config
from launch.exits import exit_status
from launch.preparation import Prepared, check_same_code
from launch.resume import record_changes
from launch.session import _coordinate, _Session, _tracker
from launch.stop import Stop
from pipeline.budget import Budget, used_s
from pipeline.clock import Clock, PhaseClock
from pipeline.plan.choose_sizes import Chosen
from pipeline.plan.search.fitting import first_sizes
from pipeline.rollout.workers import Workers
from pipeline.run import tracking
from pipeline.run.console import Console
from pipeline.run.meter import Hardware, RunMeter
from pipeline.run.mirror import Mirror
from pipeline.run.run_folder import RunFolder
from rewards.forms import recognise
from tests.run_process import FakeClock, LocalScorer, Script, left_behind
from tests.samples import CharTokenizer, make_config, make_data
from tests.stub_workers import Disk, StubWorker


class Session:
    """One process of a run, with fake actors that a test may alter before `run`."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        *,
        extend: Budget | None = None,
        clock: FakeClock | None = None,
        durations: dict[str, float] | None = None,
    ) -> None:
        self.stop = Stop("stopping")
        self.script = Script(stop=self.stop.event)
        if clock is not None:
            self.script.clock, self.script.durations = clock, durations or {}
        self.folder = RunFolder.of(config)
        self.learner: Any = StubWorker(self.script, disk=disk, seed=config.run.seed)
        self.scorer = LocalScorer(self.script, config)
        self.prepared = Prepared(
            config,
            make_data(),
            CharTokenizer(),
            self.folder,
            extend,
            tracking.choose_mode(config)[0],
        )

    def run(self) -> int:
        config, now = self.prepared.config, self.script.clock
        clock = Clock(0.0, used_before_s=used_s(self.folder), now=now)
        meter = RunMeter(self.folder, Hardware.of(config), PhaseClock())
        self.console, tracker = Console(clock=clock), _tracker(self.prepared)
        mirror = Mirror(None)
        session = _Session(self.prepared, self.stop, clock, meter, tracker, mirror, self.console)
        workers = Workers(
            samplers=[self.learner],
            learner=self.learner,
            scorer=self.scorer,
            config=config,
            clock=clock,
            stop=self.stop.event,
        )
        chosen = Chosen(first_sizes(config, self.folder.plan), 0.0, 0.0, (), {})

        async def run() -> int:
            return await _coordinate(session, cast("RunActors", self), workers, chosen)

        with closing(self.folder):
            return asyncio.run(run())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return list(self.folder.events(kind))

    def stop_at(self, call: str, number: signal.Signals = signal.SIGINT) -> None:
        """Sends a signal before a call of a worker."""
        self.script.on[call] = lambda: self.stop._on_signal(number)


def test_a_signal_gives_its_exit_status_and_the_run_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, disk = make_config(tmp_path), Disk()
    for steps, number, status in ((1, signal.SIGINT, 130), (2, signal.SIGTERM, 143)):
        session = Session(config, disk)
        session.stop_at(f"learner.update {steps - 1}", number)
        assert session.run() == status
        summary = session.folder.summary
        assert summary is not None
        assert (summary["ended"], summary["steps"]) == ("interrupted", steps)
        assert f"interrupted: {tmp_path}/run" in capsys.readouterr().out
    last, alarm = Session(config, disk), {"step": 2, "rule": "all_equal"}
    last.folder.journal("alarm", **alarm, part="", fact="groups are equal")
    assert last.run() == 0
    assert last.console.status.last_alarm == {**alarm, "text": "groups are equal"}
    assert "resuming after step 2" in capsys.readouterr().out
    assert [entry["step"] for entry in last.events("resumed")] == [1, 2]


@pytest.mark.parametrize("what", ["probe", "rewards"])
def test_a_run_that_stops_itself_exits_with_1_and_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
):
    config, disk = make_config(tmp_path), Disk()
    session = Session(config, disk)
    if what == "probe":
        session.learner.score_error = 1.0
        told = "under a random adapter the log-probs of the sampler differ from the learner's by"
    else:
        session.scorer.forms["correct"] = recognise(lambda inputs: [nan] * len(inputs), {})
        told = "alarm excluded: step 1: 100.0% of the rollouts have no reward, "
    assert session.run() == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(told)
    assert "Traceback" not in shown.err
    (entry,) = session.events("failed")
    assert told in entry["error"]
    # A refused probe would be refused again.
    assert ("the same command continues" in shown.out) == (what == "rewards")
    assert session.folder.summary is None
    if what == "rewards":
        assert Session(config, disk).run() == 0


def interrupted(folder: Path, disk: Disk, *, steps: int) -> Session:
    """A process that was killed after `steps` of four steps; every second one has a checkpoint."""
    session = Session(make_config(folder, budget={"steps": 4}), disk)

    def killed() -> None:
        raise RuntimeError("killed")

    session.script.on[f"learner.update {steps}"] = killed
    assert session.run() == 1
    return session


def test_promise_4_a_start_without_checkpoints_is_refused_and_changes_nothing(tmp_path: Path):
    disk = Disk()
    first = interrupted(tmp_path / "one", disk, steps=3)
    assert sorted(disk) == [2]
    files = [path for path in first.folder.path.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    elsewhere = Session(first.prepared.config, Disk())
    told = rf"{first.folder.path} lists checkpoints up to step 2, and the learner finds none"
    with pytest.raises(ValueError, match=told):
        elsewhere.run()
    assert {path: path.read_bytes() for path in files} == before
    # With the checkpoints back the run continues as if nothing had happened.
    whole = Session(make_config(tmp_path / "whole", budget={"steps": 4}), Disk())
    whole.run()
    again = Session(first.prepared.config, disk)
    assert again.run() == 0
    assert left_behind(again.folder) == left_behind(whole.folder)


def test_an_extension_is_journaled_once_and_lasts(tmp_path: Path):
    config, disk = make_config(tmp_path, budget={"steps": 2}), Disk()
    Session(config, disk).run()
    first = Session(config, disk, extend=Budget(3, None))
    first.stop_at("learner.update 2")
    assert first.run() == 130
    second = Session(config, disk)
    assert second.run() == 0
    assert second.learner.version == 5
    assert [(entry["steps"], entry["time_s"]) for entry in second.events("extended")] == [(3, None)]
    assert [row["step"] for row in second.folder.metrics] == [1, 2, 3, 4, 5]


def test_promise_6_a_budget_below_the_measured_minimum_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = make_config(tmp_path, budget={"time": "1000s", "steps": None})
    session = Session(
        config, Disk(), clock=FakeClock(), durations={"sampler0.generate:test": 600.0}
    )
    assert session.run() == 2
    told = capsys.readouterr().err
    assert told.startswith("budget: 16m40s leaves no time for a step between the evaluations and")
    (entry,) = session.events("refused")
    # Tests before: 600 s; a step of four: twice the time of their four answers; tests after: 600 s.
    assert entry["minimum_s"] > 600 + 600
    assert session.events("failed") == []
    assert session.folder.export.is_dir()


def test_changed_code_of_a_reward_is_refused_until_it_is_accepted(tmp_path: Path):
    config = make_config(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    folder.close()
    old = {"correct": "a" * 64, "format": "b" * 64}
    check_same_code(folder, old, accept=())  # of a run that began without hashes: unknown
    folder.journal("started", code="", base="", data={}, rewards=old)
    new = {**old, "format": "c" * 64}
    with pytest.raises(ValueError, match=r"format\.code: was .*\(--accept rewards\)"):
        check_same_code(folder, new, accept=())
    check_same_code(folder, new, accept=["rewards"])
    (change,) = record_changes(folder, config, new, step=7)
    folder.journal("started", code="", base="", data={}, rewards=new)
    assert change == ("rewards.functions.format.code", "b" * 12, "c" * 12)
    (entry,) = folder.events("rewards_changed")
    assert (entry["after_step"], entry["changes"]) == (7, [list(change)])
    # The next start finds the accepted code.
    check_same_code(folder, new, accept=())
    assert record_changes(folder, config, new, step=9) == []


# --- a disk that is full while one kind of file is written


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
STEPS: dict[str, Any] = {"budget": {"steps": 4}}


def fill(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """Makes writes of a file fail, after some successful ones, once a part of it is written."""
    opened, left = Path.open, [after]

    def open_file(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.name in {name, f"{name}.tmp"} and mode[0] in "aw":
            left[0] -= 1
            if left[0] < 0:
                with opened(path, mode[0] + "b") as file:
                    file.write(b'{"step": 3, "torn')
                raise FULL
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_file)


def raise_full() -> None:
    raise FULL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("config.json", 0),
        ("journal.jsonl", 4),
        ("metrics.jsonl", 2),
        ("a file", 0),
    ],
)
def test_a_full_disk_ends_with_one_sentence_and_the_run_resumes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    after: int,
):
    whole = Session(make_config(tmp_path / "whole", **STEPS), Disk())
    assert whole.run() == 0
    config, disk = make_config(tmp_path / "full", **STEPS), Disk()
    capsys.readouterr()
    session = Session(config, disk)
    if name == "a file":  # of a checkpoint
        session.script.on["learner.save 2"] = raise_full
    fill(monkeypatch, name, after)
    assert exit_status(session.run) == 1
    monkeypatch.undo()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"{name} cannot be written: No space left on device" in sentence
    assert "give the same command again" in sentence
    again = Session(config, disk)
    assert exit_status(again.run) == 0
    assert left_behind(again.folder) == left_behind(whole.folder)
    assert list(again.folder.path.rglob("*.tmp")) == []
