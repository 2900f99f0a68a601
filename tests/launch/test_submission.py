"""Waiting time of submitted jobs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from configs.budget import Budget
from launch.submission import VARIABLE, waited_s

TIMED = Budget(time="1h", from_submission=True)


@pytest.fixture(autouse=True)
def _clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 70.0)


@pytest.mark.parametrize(
    # The process started 10 s ago, at 4990.
    ("submitted", "waited"),
    [("4900.5", 89.5), ("4990", 0.0), ("4991.2", 0.0)],
)
def test_waiting_is_from_submission_to_start(
    monkeypatch: pytest.MonkeyPatch, submitted: str, waited: float
):
    monkeypatch.setenv(VARIABLE, submitted)
    assert waited_s(TIMED, started=60.0) == waited
    assert waited_s(Budget(time="1h"), started=60.0) == 0.0


def test_a_process_that_was_not_submitted_has_not_waited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"^budget\.from_submission: this is not a job that"):
        waited_s(TIMED, started=60.0)


def test_submit_sets_the_time():
    script = Path(__file__).parents[2] / "launch/submit.sh"
    assert f'"{VARIABLE}": f"{{time.time():.3f}}"' in script.read_text(encoding="utf-8")
