"""Invariant 10, the deadline is kept: hundreds of whole runs in simulated time.

Budgets from below the minimum to 24 hours, steps that become up to ten times as long or as short,
stalls, slow exports, processes that are killed and resumed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from pipeline.control.deadline import BudgetTooSmallError
from pipeline.control.reserve import SAFETY
from pipeline.run import records
from tests.fakes import PROMPTS, Disk, make_config, make_data, validated
from tests.simulation import TimedProcess, World

SCENARIOS, FILES = 500, 10
_DAY_S = 86_400
_MOST_STEPS = 40
_ROUGHLY = 0.2
"""Share by which the number of steps may be another than was planned halfway."""


@dataclass
class Scenario:
    """A run's settings and the world it is in."""

    tables: dict[str, Any]
    world: World


@dataclass
class Ended:
    """What came of a run: its last process, how that ended, and the minimum if it was refused."""

    process: TimedProcess
    how: str
    minimum_s: float | None = None

    @property
    def wall_s(self) -> float:
        """Time used, on the run's own clock."""
        assert self.process.folder.summary is not None
        return float(self.process.folder.summary["wall_s"])


def scenario(seed: int) -> Scenario:
    """Budget, durations and mishaps of a scenario."""
    rng = np.random.default_rng([20261122, seed])
    budget_s = round(float(np.exp(rng.uniform(np.log(60), np.log(_DAY_S)))))
    # Start, tests twice, validations twice and exports twice take this share of the budget.
    ends = rng.uniform(0.05, 1.05) * budget_s
    start, test, validation, export = rng.dirichlet([1, 1, 1, rng.choice([0.3, 1, 3])]) * ends
    validates = rng.random() < 0.85
    steps = np.exp(rng.uniform(np.log(1), np.log(_MOST_STEPS)))
    step_s = max(budget_s - ends, 0.1 * budget_s) / steps
    seconds = {
        "start": start,
        "test": test / 2,
        "validation": validation / 2 if validates else 0.0,
        "export": export / 2,
        "train": 0.4 * step_s,
        "score": 0.05 * step_s,
        "update": 0.5 * step_s,
        "publish": 0.02 * step_s,
        "save": 0.03 * step_s,
    }
    drift = float(np.exp(rng.uniform(np.log(0.1), np.log(10)))) if rng.random() < 0.7 else 1.0
    stalls = {}
    if rng.random() < 0.3:
        # What draws and what scores can be abandoned, however long it stalls.
        call = (str(rng.choice(["train", "score", "validation"])), int(rng.integers(2, 12)))
        stalls[call] = float(rng.uniform(1, 2 * steps) * step_s)
    if rng.random() < 0.2:
        stalls["update", int(rng.integers(1, 10))] = float(rng.uniform(1, 4) * step_s)
    kills = sorted(rng.uniform(0.02, 1, rng.integers(1, 4)) * budget_s)
    world = World(
        seed=seed,
        seconds=seconds,
        budget_s=budget_s,
        drift=drift,
        stalls=stalls,
        kills=[float(kill_s) for kill_s in kills] if rng.random() < 0.4 else [],
    )
    prompts = int(rng.integers(2, 6))
    tables: dict[str, Any] = {
        "budget": {"steps": None, "time": f"{budget_s}s"},
        "checkpoint": {"every_steps": int(rng.integers(1, 6))},
        "learner": {"schedule": str(rng.choice(["linear", "cosine", "constant"])), "lr": 1e-3},
        "rollout": {
            "prompts_per_step": prompts,
            "min_prompts_per_step": int(rng.integers(1, prompts)) if rng.random() < 0.5 else None,
        },
    }
    if validates:
        tables["data"] = {"validation": {"path": "validation.jsonl"}}
        tables["eval"] = {"every_steps": int(rng.integers(1, 6))}
    return Scenario(tables, world)


def config_of(folder: Path, found: Scenario) -> Config:
    return make_config(folder, **found.tables)


def run(folder: Path, found: Scenario) -> Ended:
    """Runs, killed and resumed as often as it is killed."""
    config, disk, world = config_of(folder, found), Disk(), found.world
    validation = PROMPTS if config.eval.validates else 0
    while True:
        data = make_data(train=PROMPTS, validation=validation, test=PROMPTS)
        process = TimedProcess(config, world=world, disk=disk, data=data)
        try:
            how = process.run_in_time()
        except BudgetTooSmallError as refused:
            return Ended(process, "refused", refused.minimum_s)
        if how != "killed":
            return Ended(process, how)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is said and nothing has to reach a disk."""
    monkeypatch.setattr("pipeline.run.run_folder.os.fsync", lambda _: None)
    monkeypatch.setattr(records.Console, "say", lambda *_: None)
    monkeypatch.setattr(records.Console, "step", lambda *_: None)
    return tmp_path


def events(ended: Ended, kind: str) -> list[dict[str, Any]]:
    return list(ended.process.folder.events(kind))


def check_export(ended: Ended, *, budget_s: float) -> None:
    """It is there in time, was evaluated, and is the best of all that were validated."""
    folder = ended.process.folder
    version, _ = (folder.export / "adapter").read_text().split()
    assert int(version) in {entry["step"] for entry in events(ended, "evaluated")}
    placed = [entry for entry in events(ended, "reserved") if entry["reason"] == "export"]
    assert placed
    assert placed[-1]["elapsed_s"] <= budget_s
    answers = {step: folder.read_rollouts(f"validation_{step:06d}") for step in validated(folder)}
    if answers:
        right = {step: sum(row["correct"] for row in rows) for step, rows in answers.items()}
        assert right[int(version)] == max(right.values())
    else:
        assert int(version) in {0, ended.process.learner.version}


def check_idle(ended: Ended, config: Config, *, world: World) -> None:
    """Under 5% of the budget or under a step, whichever is larger, is left unused.

    A step here includes its validation: without it a step is good for nothing. What was reserved
    for the export of a last version that then was not the best is no idle time, nor is what the
    last export took less than the one before, nor are two deviations of the noise of the last step
    and of the evaluations.
    """
    deadline = ended.process.coordinator.deadline
    steps = [row["time/step_s"] for row in ended.process.folder.metrics]
    smallest = config.rollout.fewest_prompts / config.rollout.prompts_per_step
    step_s = max([*steps[-5:], deadline.pace.expected_s(share=smallest)])
    step_s += deadline.reserve.part_s("validation evaluation")
    idle_s = world.budget_s - ended.wall_s
    idle_s -= 2 * world.noise * (step_s + deadline.tests_s)
    *_, before_s, last_s = 0.0, *deadline.reserve.measured["export"]
    idle_s -= max(0.0, before_s - last_s)
    exported = [entry["reason"] for entry in events(ended, "exported")]
    if exported[-1:] not in (["best"], ["last"]):
        idle_s -= SAFETY * deadline.export_s
    shares = idle_s / world.budget_s, idle_s / step_s
    assert idle_s <= max(0.05 * world.budget_s, step_s), shares


def check_decay(ended: Ended) -> None:
    """Already halfway the decay is planned for about as many steps as there are in the end.

    But for those whose time was taken by exports before the end, which no plan foresees.
    """
    steps = [row["time/step_s"] for row in ended.process.folder.metrics]
    early = [entry["seconds"] for entry in events(ended, "exported") if entry["reason"] == "better"]
    done = len(steps)
    plans = [entry for entry in events(ended, "planned") if entry["step"] <= done // 2]
    planned, most = plans[-1]["total_steps"], max(2, _ROUGHLY * done)
    assert -most <= planned - done <= most + sum(early) / min(steps), (planned, done)


def check(folder: Path, seed: int) -> str:
    """Runs a scenario and checks all that must hold; returns how it ended."""
    found = scenario(seed)
    config = config_of(folder, found)
    budget_s = float(found.world.budget_s)
    killed = bool(found.world.kills)
    ended = run(folder, found)
    folder_ = ended.process.folder
    if ended.how == "refused":
        assert not folder_.metrics
        assert ended.minimum_s is not None
        assert ended.minimum_s > budget_s or killed
        first = next((e for e in events(ended, "evaluated") if e["name"] == "test_before"), None)
        if first is not None:
            check_export(ended, budget_s=float("inf"))
        return "refused"
    assert ended.how == "finished"
    least_s = ended.process.coordinator.deadline.keep_for_export_s(tests=False)
    if killed and ended.process.ready_s + 2 * least_s > budget_s:
        # Killed so late that it could not be started again in time.
        check_export(ended, budget_s=float("inf"))
        return "late"
    # Only an update cannot be abandoned; what was exported before it stays.
    stuck = any(begun <= budget_s < done + 2 * least_s for begun, done in found.world.updates)
    assert ended.wall_s <= budget_s + 1e-6 or stuck
    check_export(ended, budget_s=budget_s)
    # A step that is abandoned has taken the time that was left, and is followed by nothing.
    if not events(ended, "abandoned"):
        check_idle(ended, config, world=found.world)
        mishaps = killed or bool(found.world.stalls)
        # The first plan is a guess; where steps become longer or shorter later ones are better.
        if not mishaps and len(folder_.metrics) > 3 and found.world.drift == 1:
            check_decay(ended)
    return "finished"


@pytest.mark.parametrize("part", range(FILES))
def test_invariant_10_the_deadline_is_kept_in_simulated_time(quiet: Path, part: int):
    per = SCENARIOS // FILES
    for seed in range(part * per, (part + 1) * per):
        try:
            check(quiet / str(seed), seed)
        except Exception as error:
            raise AssertionError(f"scenario {seed}: {error!r}") from error
        shutil.rmtree(quiet / str(seed), ignore_errors=True)
