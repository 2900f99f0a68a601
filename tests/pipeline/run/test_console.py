"""The console: lines without a terminal, a view on one, and `status.json`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import pytest

from pipeline.clock import Clock
from pipeline.run import console as console_module
from pipeline.run.console import Console
from tests.run_process import FakeClock

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
PROJECT = Path(__file__).parents[3]


def test_plans_of_a_step_replace_earlier_ones():
    said, clock = list[str](), Clock(started=0.0, now=FakeClock())
    console = Console("demo", clock=clock, write=said.append, now=lambda: NOON)
    console.update(steps_planned=80, deadline_s=50.0)
    clock.started = -100.0
    plans = {"budget/steps_planned": 70.0, "budget/left_s": 90.0, "budget/expected_end_s": 60.0}
    console.step(3, plans)
    assert said == ["2026-11-23T12:00:00Z step 3/70  budget left 1:30  expected end 12:01Z"]
    clock.started = -110.0
    assert console.status.left_s == 80.0


def test_after_a_silence_a_line_says_what_the_run_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(console_module, "QUIET_S", 0.0)
    monkeypatch.setattr(console_module, "_TICK_S", 0.001)
    said, spoken = list[str](), Event()

    def write(text: str) -> None:
        said.append(text)
        spoken.set()

    console = Console("demo", phase=lambda: "evaluation", write=write, now=lambda: NOON)
    with console, console.activity("validation", "answers") as show:
        show(120, 500)
        spoken.clear()
        assert spoken.wait(60)
    assert not console.status.activities
    assert said[-1] == "2026-11-23T12:00:00Z evaluating  validation 120 of 500 answers"


# --- status.json


def test_the_file_follows_the_run_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console_module, "_TICK_S", 0.001)
    file, seen = tmp_path / "status.json", list[tuple[str, int]]()
    phases = iter(["ray_start"] * 3)
    with Console("demo", phase=lambda: next(phases, "sample"), status_file=file) as console:
        console.update(step=7)
        while not seen or seen[-1] != ("sample", 7):
            with suppress(FileNotFoundError):  # not written yet; never torn
                found = json.loads(file.read_bytes())
                seen.append((found["phase"], found["step"]))
        assert found["pid"] == os.getpid()
        console.end("finished")
    assert json.loads(file.read_bytes())["phase"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_an_error_is_the_end_of_the_run(tmp_path: Path):
    file = tmp_path / "status.json"
    for error, ended in (
        (ValueError, "refused"),
        (RuntimeError, "failed"),
        (SystemExit, "interrupted"),
    ):
        with pytest.raises(error), Console(status_file=file):
            raise error
        assert json.loads(file.read_bytes())["phase"] == ended


# --- on a terminal

SCRIPT = """
import os, sys
from pipeline.run.console import Console

with Console("demo", phase=lambda: "sample") as console:
    console.update(
        steps_planned=80,
        last_alarm={"step": 12, "rule": "all_equal", "text": "groups have [equal] rewards"},
    )
    console.step(42, {"groups/mixed": 3.0, "groups/all_equal": 5.0, "rollout/entropy": 0.25})
    with console.activity("step 43", "rollouts") as show:
        show(130, 256)
        console.say("a line with [brackets] and " + 80 * "a long end ")
        print("printed")
        print("to stderr", file=sys.stderr)
        console._live.refresh()
        END
"""


def on_a_terminal(end: str) -> tuple[str, int]:
    """What a script shows on a terminal of 100 x 40, and its exit status."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("END", end)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=PROJECT,
        env=environment,
    )
    os.close(follower)
    shown = b""
    with suppress(OSError):  # the other side is closed
        while select.select([leader], [], [], 60)[0]:
            part = os.read(leader, 65536)
            if not part:
                break
            shown += part
    os.close(leader)
    return shown.decode(), process.wait()


@pytest.mark.parametrize(
    ("end", "status"), [("pass", 0), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", -9)]
)
def test_a_view_is_drawn_and_the_terminal_is_as_before(end: str, status: int):
    shown, found = on_a_terminal(end)
    assert found == status, shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor
    assert "\x1b[?1049h" not in shown  # no other screen
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    for text in (
        "a line with [brackets] and " + (80 * "a long end ").strip(),
        "printed",
        "to stderr",
        "130 of 256 rollouts",
        "step 42/80  sampling",
        "3 mixed, 5 equal",
        "step 12: groups have [equal] rewards",
    ):
        assert text in plain
    if status == 1:
        assert "ZeroDivisionError" in plain.splitlines()[-1]
