"""Records of a healthy run, and the same with a planted problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.report.run_records import RunRecords

STEPS = 12
GROUP = 8
Change = Callable[[int], Mapping[str, float]]


def metrics(step: int) -> dict[str, float]:
    """A step of a run that learns: the reward rises from 0.3, with some noise."""
    noise = 0.01 * (step * 7 % 5 - 2)
    return {
        "step": step,
        "reward/mean": 0.3 + 0.02 * step + noise,
        "reward/std": 0.4,
        "groups/mixed": 20.0,
        "groups/all_equal": 4.0,
        "groups/short": 0.0,
        "learner/grad_norm": 0.2,
        "time/step_s": 4.0,
        "time/elapsed_s": 60.0 + 4 * step,
    }


def account(step: int) -> dict[str, Any]:
    """The ledger of a step of 4 s; step 0: the start of 60 s."""
    if step == 0:
        seconds = {
            "driver": {"ray_start": 10.0, "loading": 50.0},
            "learner": {"loading": 20.0, "compile": 40.0},
            "sampler 0": {"loading": 30.0, "compile": 30.0},
        }
        return {"step": 0, "start": 0.0, "end": 60.0, "seconds": seconds, "tokens": {}}
    seconds = {
        "driver": {"waiting_samplers": 1.0, "waiting_rewards": 0.1, "waiting_learner": 2.9},
        "learner": {"waiting_samplers": 1.1, "update": 2.4, "update_padding": 0.5},
        "sampler 0": {"prefill": 0.1, "decode": 0.7, "decode_idle": 0.2, "waiting_learner": 3.0},
        "reward correct 0": {"scoring": 0.1, "waiting_samplers": 3.9},
    }
    tokens = {"trained": 4000, "no_signal": 800}
    start = 56.0 + 4 * step
    row = {"step": step, "start": start, "end": start + 4, "seconds": seconds, "tokens": tokens}
    return {**row, "work": {"generated": 4800, "segments": {}}}


def run(
    *,
    change: Change = lambda _: {},
    seconds: Mapping[str, Mapping[str, float]] | None = None,
    journal: list[dict[str, Any]] | None = None,
    steps: int = STEPS,
    group: int = GROUP,
    ledger: bool = True,
) -> RunRecords:
    """The records of a run.

    Args:
        change: metrics of a step that differ.
        seconds: ledger rows of a process in each step that differ.
        journal: further entries.
        steps: of the run.
        group: rollouts of a prompt.
        ledger: whether it has a ledger.
    """
    accounts = [account(step) for step in range(steps + 1)] if ledger else []
    for one in accounts[1:]:
        one["seconds"] |= {name: dict(rows) for name, rows in (seconds or {}).items()}
    return RunRecords(
        path=Path("runs/planted"),
        config={
            "run": {"name": "planted"},
            "rollout": {"group_size": group, "max_new_tokens": 36},
            "rewards": {"functions": [{"name": "correct"}]},
        },
        journal=[{"event": "resumed", "step": 0}, {"event": "started"}, *(journal or [])],
        metrics=[{**metrics(step), **change(step)} for step in range(1, steps + 1)],
        ledger=accounts,
    )


def alarm(rule: str, *, step: int = 10, value: float = 0.99, part: str = "") -> dict[str, Any]:
    """A journal entry."""
    return {
        "event": "alarm",
        "rule": rule,
        "part": part,
        "step": step,
        "value": value,
        "threshold": 0.5,
        "action": "log",
        "fact": f"the value is {value:.2f}",
    }
