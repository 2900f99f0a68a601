"""Where the seconds of a run went: sums over its ledger, by kind of process and by group of rows.

Folders without a ledger have the phases of their steps in `time/..._s` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pipeline.report.run_records import RunRecords
from pipeline.run.ledger import DRIVER, START_ROWS, by_kind

Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by row, by kind of process: driver, learner, samplers, rewards."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "rollouts": ("prefill", "decode", "waiting_samplers"),
    "update": ("update", "waiting_learner"),
    "rewards": ("scoring", "waiting_rewards"),
    "idle slots, padding": ("decode_idle", "update_padding"),
    "evaluation, records": ("sync", "checkpoint", "evaluation", "export", "end", "coordination"),
    "start": (*START_ROWS, "device_wait", "restart"),
    "lost": ("stalled", "repeated", "unexplained"),
}
"""Rows of the ledger by what they are for. A process other than the driver that waits does not
contribute: `grouped` counts its waiting rows as `WAITING`."""
WAITING = "waiting"
COMPILING = ("compile", "compile_cached")
_BESIDE_TRAINING = {*START_ROWS, "device_wait", "restart", "export", "end"} - {*COMPILING}
_GROUP_OF = {row: group for group, rows in GROUPS.items() for row in rows}
_PHASES = {
    "time/sample_s": "waiting_samplers",
    "time/reward_s": "waiting_rewards",
    "time/learn_s": "waiting_learner",
    "time/sync_s": "sync",
}
"""Rows of the driver that these metrics of a step correspond to."""


def training_seconds(run: RunRecords) -> dict[str, dict[str, float]]:
    """The seconds from the first step on, without those of starts and of the run's end.

    Without a ledger these are the driver's, from the metrics of the steps; empty without steps.
    """
    if run.ledger:
        found = by_kind(row["seconds"] for row in run.ledger if row["step"] >= 1)
        return {
            kind: {row: value for row, value in rows.items() if row not in _BESIDE_TRAINING}
            for kind, rows in found.items()
        }
    phases: Counter[str] = Counter()
    for row in run.metrics:
        known = {name: row[metric] for metric, name in _PHASES.items() if metric in row}
        phases.update(known)
        phases["coordination"] += max(0.0, row.get("time/step_s", 0.0) - sum(known.values()))
    return {DRIVER: dict(phases)} if phases.total() else {}


def grouped(kind: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by group, in the order of `GROUPS`, `WAITING` last; groups without time left out."""
    found = dict.fromkeys([*GROUPS, WAITING], 0.0)
    for row, value in seconds.items():
        waits = row.startswith(WAITING) and (kind != DRIVER or row not in _GROUP_OF)
        found[WAITING if waits else _GROUP_OF.get(row, "lost")] += value
    return {group: value for group, value in found.items() if value > 0}
