"""Profiles: which steps, and that results do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run_process import Script, left_behind
from tests.samples import make_config
from tests.stub_workers import StubRun


def config(folder: Path, steps: str | None) -> Any:
    return make_config(folder, profile={"steps": steps}, budget={"steps": 4})


def traced(run: StubRun) -> list[str]:
    return sorted(path.name for path in (run.folder.path / "profile").iterdir())


@pytest.mark.parametrize("steps", ["2-3", "4"])
def test_the_named_steps_are_profiled_and_their_results_are_the_same(tmp_path: Path, steps: str):
    plain = StubRun(config(tmp_path / "plain", None))
    assert plain.run() == "finished"
    assert not (plain.folder.path / "profile").exists()
    run = StubRun(config(tmp_path / "profiled", steps))
    assert run.run() == "finished"
    assert left_behind(run.folder)["rollouts"] == left_behind(plain.folder)["rollouts"]
    assert run.worker.adapter == plain.worker.adapter
    assert traced(run) == ["learner", "sampler_0"]


def test_a_run_that_stops_writes_what_was_profiled(tmp_path: Path):
    script = Script()
    script.on["learner.update 2"] = script.stop.set
    run = StubRun(config(tmp_path, "2-4"), script=script)
    assert run.run() == "interrupted"
    assert traced(run) == ["learner", "sampler_0"]
