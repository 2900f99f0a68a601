"""Profiles: which steps, and that results do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.run_process import Script, left_behind
from tests.samples import make_config
from tests.stub_workers import StubRun


def profiled(folder: Path, steps: str | None, **more: Any) -> StubRun:
    return StubRun(make_config(folder, profile={"steps": steps}, budget={"steps": 4}), **more)


def test_the_named_steps_are_profiled_and_their_results_are_the_same(tmp_path: Path):
    plain, run = profiled(tmp_path / "plain", None), profiled(tmp_path / "profiled", "2-3")
    assert (plain.run(), run.run()) == ("finished", "finished")
    assert not (plain.folder.path / "profile").exists()
    assert left_behind(run.folder)["rollouts"] == left_behind(plain.folder)["rollouts"]
    assert run.worker.adapter == plain.worker.adapter
    script = Script()
    script.on["learner.update 2"] = script.stop.set
    stopped = profiled(tmp_path / "stopped", "2-4", script=script)
    assert stopped.run() == "interrupted"
    for one in (run, stopped):
        traced = sorted(path.name for path in (one.folder.path / "profile").iterdir())
        assert traced == ["learner", "sampler_0"]
