"""Records of a healthy run, and the same with a planted problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.run.report.run_records import RunRecords

STEPS = 12
Change = Callable[[int], Mapping[str, float]]
STARTED = {"event": "started", "elapsed_s": 10.0, "used_before_s": 0.0, "seconds": {"compile": 10}}


def metrics(step: int) -> dict[str, float]:
    """A step of a run that learns: the reward rises from 0.3, with some noise."""
    noise = 0.01 * (step * 7 % 5 - 2)
    return {
        "step": step,
        "reward/mean": 0.3 + 0.02 * step + noise,
        "groups/mixed": 20.0,
        "groups/all_equal": 4.0,
        "time/step_s": 4.0,
        "time/sample_s": 1.0,
        "time/reward_s": 0.1,
        "time/learn_s": 2.9,
        "time/elapsed_s": 10.0 + 4 * step,
        "time/devices/decode_s": 0.9,
        "time/devices/update_s": 2.9,
    }


def run(
    *,
    change: Change = lambda _: {},
    journal: Sequence[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    steps: int = STEPS,
) -> RunRecords:
    """Records of a run: metrics of a step that differ, further entries of the journal."""
    return RunRecords(
        path=Path("runs/planted"),
        config={"run": {"name": "planted"}, "rewards": {"functions": [{"name": "correct"}]}},
        journal=[{"event": "resumed", "step": 0}, STARTED, *journal],
        summary=summary or {},
        metrics=[{**metrics(step), **change(step)} for step in range(1, steps + 1)],
    )


def alarm(rule: str, *, step: int = 10) -> dict[str, Any]:
    """A journal entry."""
    return {"event": "alarm", "rule": rule, "step": step, "fact": "the value is 0.99"}
