"""Where the time of a real run went: every second of it has a phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def check_time(run: Path) -> dict[str, float]:
    """Checks that the phases sum up to the time of an ended run; returns its seconds by phase.

    Waits for devices do not count as used.
    """
    summary = json.loads((run / "summary.json").read_text())
    seconds: dict[str, float] = summary["time"]["seconds"]
    used_s = sum(seconds.values()) - seconds.get("device_wait", 0.0)
    assert used_s == pytest.approx(summary["wall_s"], abs=0.1)
    return seconds
