"""Profiles: which steps, the timeline, and that results do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.contracts.phases import Span
from pipeline.report.profile import chrome_trace
from tests.fakes import Disk, FakeClock, Process, Script, left_behind, make_config


def test_the_timeline_has_all_processes_on_one_clock_within_the_steps():
    spans = {
        "driver": [Span("coordination", 90.0, 101.0), Span("sample", 101.0, 104.0)],
        "sampler 0": [Span("decode", 102.0, 103.5, spare=0.25), Span("decode", 110.0, 111.0)],
    }
    steps = [Span("step 3", 100.0, 104.0), Span("step 4", 105.0, 108.0)]
    found = chrome_trace(spans, steps)
    named = {one["pid"]: one["args"]["name"] for one in found["traceEvents"] if one["ph"] == "M"}
    assert named == {0: "steps", 1: "driver", 2: "sampler 0"}
    placed = [
        (named[one["pid"]], one["name"], one["ts"], one["dur"])
        for one in found["traceEvents"]
        if one["ph"] == "X"
    ]
    assert placed == [
        ("steps", "step 3", 0.0, 4e6),
        ("steps", "step 4", 5e6, 3e6),
        ("driver", "coordination", 0.0, 1e6),
        ("driver", "sample", 1e6, 3e6),
        ("sampler 0", "decode", 2e6, 1.5e6),
    ]
    assert found["traceEvents"][-1]["args"] == {"spare": 0.25}
    assert found["otherData"] == {"start_unix_s": 100.0, "end_unix_s": 108.0}


def config(folder: Path, steps: str | None) -> Any:
    return make_config(folder, profile={"steps": steps}, budget={"steps": 4})


@pytest.mark.parametrize(("steps", "shown"), [("2-3", "step 2 to step 3"), ("4", "step 4")])
def test_the_named_steps_are_profiled_and_their_results_are_the_same(
    tmp_path: Path, steps: str, shown: str
):
    plain = Process(config(tmp_path / "plain", None), disk=Disk())
    assert plain.run() == "finished"
    assert not (plain.folder.path / "profile").exists()
    script = Script(clock=FakeClock(), durations={"learner.update": 2.0, "sampler0.generate": 3.0})
    run = Process(config(tmp_path / "profiled", steps), disk=Disk(), script=script)
    assert run.run() == "finished"
    assert left_behind(run.folder)["rollouts"] == left_behind(plain.folder)["rollouts"]
    assert run.learner.adapter == plain.learner.adapter
    folder = run.folder.path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "learner",
        "sampler_0",
        "timeline.json",
    ]
    (event,) = run.events("profiled")
    assert event == {"folder": str(folder)}
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    names = [one["name"] for one in events if one["pid"] == 0 and one["ph"] == "X"]
    assert names == list(dict.fromkeys(shown.split(" to ")))


def test_a_run_that_stops_writes_what_was_profiled(tmp_path: Path):
    script = Script(durations={"learner.update": 2.0})
    script.on["learner.update 2"] = script.stop.set
    run = Process(config(tmp_path, "2-4"), disk=Disk(), script=script)
    assert run.run() == "interrupted"
    events = json.loads((run.folder.path / "profile" / "timeline.json").read_text())["traceEvents"]
    names = [one["name"] for one in events if one["pid"] == 0 and one["ph"] == "X"]
    assert names == ["step 2", "step 3"]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = Process(config(tmp_path, "2-3"), disk=Disk())
    script = run.script

    def full() -> None:
        (run.folder.path / "profile" / "timeline.json").mkdir(parents=True)

    script.on["learner.update 1"] = full
    assert run.run() == "finished"
    assert "no timeline of the profile: " in capsys.readouterr().out
    assert run.events("profiled") == []


@pytest.mark.parametrize(
    ("steps", "says"),
    [("0-3", 'nearest valid: "3-5"'), ("three", "a step or two"), ("5-3", 'valid: "3-5"')],
)
def test_other_steps_are_refused(tmp_path: Path, steps: str, says: str):
    with pytest.raises(ValidationError, match=says):
        config(tmp_path, steps)
