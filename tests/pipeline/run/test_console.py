"""The console: lines without a terminal, a view on one, `status.json`, the line of a step."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import pytest

from pipeline.clock import Clock
from pipeline.run import console as console_module
from pipeline.run.console import Console
from pipeline.run.status import Activity, Status, step_line
from tests.run_process import FakeClock

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_view_is_drawn_below_the_lines_and_the_terminal_is_always_as_before(
    monkeypatch: pytest.MonkeyPatch,
):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("rich._console", None)  # made when first used
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    long_line = "a line with [brackets] and " + (80 * "a long end ").strip()
    with Console("demo", phase=lambda: "sample") as console:
        alarm = {"step": 12, "rule": "all_equal", "text": "groups have [equal] rewards"}
        console.update(steps_planned=80, last_alarm=alarm)
        console.step(42, {"groups/mixed": 3.0, "groups/all_equal": 5.0})
        with console.activity("step 43", "rollouts") as show:
            show(130, 256)
            console.say(long_line)
            sys.stdout.write("printed\n")
            assert console._live is not None
            console._live.refresh()
        shown = terminal.getvalue()  # as a kill leaves it
        assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor
    assert "\x1b[?1049h" not in terminal.getvalue()  # no other screen
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    for text in (
        *(long_line, "printed", "130 of 256 rollouts", "step 42/80  sampling"),
        *("3 mixed, 5 equal", "step 12: groups have [equal] rewards"),
    ):
        assert text in plain


# --- the line of a step

METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "reward/excluded_share": 0.125,
    "reward/errors": 2.0,
    "reward/correct": 0.375,
    "reward/format": 1.0,
    "reward_parts/correct/none_share": 0.0,
    "reward_parts/format/none_share": 0.0,
    "reward_parts/unscored/none_share": 1.0,
    "groups/mixed": 21.0,
    "groups/all_equal": 3.0,
    "rollout/entropy": 0.25,
    "rollout/tokens_mean": 27.04,
    "speed/generated_tokens_per_s": 3120.4,
    "hbm/learner/peak_gib": 1.25,
    "hbm/learner/in_use_gib": 0.75,
    "hbm/learner/planned_gib": 9.0,
    "hbm/sampler_0/peak_gib": 1.5,
    "time/step_s": 2.67,
}
STATUS = Status(
    "demo",
    "sample",
    step=42,
    steps_planned=80,
    best_validation={"step": 30, "metric": "accuracy", "value": 0.59},
    last_alarm={"step": 12, "rule": "all_equal", "text": "groups have equal rewards"},
    metrics=METRICS,
    activities=(Activity("step 43", "rollouts", 130, 256),),
    elapsed_s=1000.0,
    deadline_s=4723.0,
    expected_end=datetime(2026, 11, 23, 13, 30, tzinfo=UTC),
)


def test_the_line_of_a_step_has_all_figures_and_the_last_alarm():
    assert step_line(STATUS).split("  ") == [
        "step 42/80",
        "reward 0.500 (12.5% excluded), correct 0.375, format 1.000, errors 2",
        *("groups 21 mixed, 3 equal", "best validation 59.0% at step 30", "entropy 0.250"),
        *("length 27.0 tokens", "speed 3,120 tokens/s", "step time 2.7 s"),
        *("device memory 1.50 GiB", "budget left 1:02:03", "expected end 13:30Z"),
        "alarm all_equal at step 12",
    ]


GROUPS = {"groups/mixed": 0.0, "groups/all_equal": 0.0}


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({}, ""),
        (
            {"reward/excluded_share": 1.0, **GROUPS},
            "  reward none (100.0% excluded)  groups 0 mixed",
        ),
        (
            {"sft/loss": 1.23456, "sft/tokens_trained": 512.0, "time/step_s": 1.0},
            "  sft loss 1.2346  tokens 512  step time 1.0 s",
        ),
    ],
)
def test_what_is_not_known_is_left_out(metrics: dict[str, float], told: str):
    assert step_line(Status(metrics=metrics)).startswith(f"step 0/?{told}")
