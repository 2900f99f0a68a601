"""A wall clock that jumps while a run runs changes neither its time nor its result."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.launch.test_session import Session
from tests.run_process import left_behind
from tests.samples import make_config
from tests.stub_workers import Disk

pytestmark = pytest.mark.slow


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    budget = {"budget": {"steps": 4}}
    whole = Session(make_config(tmp_path / "whole", **budget), Disk())
    assert whole.run(started=time.monotonic()) == 0
    jumps, true = itertools.cycle([0.0, 9e6, -9e6]), time.time
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))
    jumped = Session(make_config(tmp_path / "jumped", **budget), Disk())
    assert jumped.run(started=time.monotonic()) == 0
    found, expected = left_behind(jumped.folder), left_behind(whole.folder)
    assert found["rollouts"] == expected["rollouts"]
    assert found["summary"]["adapter_sha256"] == expected["summary"]["adapter_sha256"]
    assert jumped.folder.summary is not None
    assert 0 <= jumped.folder.summary["wall_s"] < 3600
    seconds = jumped.folder.summary["time"]["seconds"]
    assert all(0 <= value < 3600 for value in seconds.values())
