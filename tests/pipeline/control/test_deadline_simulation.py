"""Invariant 10, the deadline is kept: hundreds of simulated runs of the controller over values.

Budgets from below the minimum to 24 hours, steps that become up to ten times longer or shorter,
stalls, slow exports, killed and resumed processes. The controller decides; a loop advances the time
for each decision and stores what a run folder would contain. No worker, no event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from pipeline.contracts.decisions import (
    CHECKPOINT,
    EXPORT,
    SYNC,
    VALIDATION,
    TrainStep,
    WorkDeadline,
    evaluation_part,
)
from pipeline.control.controller import RunController
from pipeline.control.deadline import BudgetTooSmallError, Deadline
from pipeline.control.duties import BestVersion, Duty, Exported, RunStatus
from pipeline.control.estimates import SAFETY
from tests.fakes import PROMPTS, Killed, make_config
from tests.simulation import World

SCENARIOS, FILES = 500, 10
_DAY_S = 86_400
_MOST_STEPS = 40
_ROUGHLY = 0.2
"""Share by which the number of steps may differ from the plan at half of the run."""
_TEST_PIECES = (0.5, 0.25, 0.25)


@dataclass
class Scenario:
    """Settings of a run and the simulated durations and faults."""

    tables: dict[str, Any]
    world: World


@dataclass
class Files:
    """State that outlives a process: journal, metrics, checkpoints, export, and the time used.

    Attributes:
        accuracy: accuracy of each validated version.
    """

    journal: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: set[int] = field(default_factory=set)
    exported: int | None = None
    best: int | None = None
    used_s: float = 0.0

    @property
    def step(self) -> int:
        return max(self.checkpoints, default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.journal if entry["event"] == kind]

    def evaluated(self, name: str) -> dict[int, float]:
        entries = [entry for entry in self.events("evaluated") if entry["name"] == name]
        return {entry["step"]: entry["accuracy"] for entry in entries}


class Abandoned(Exception):  # noqa: N818  # as `rollout.workers.OutOfTime`
    """The deadline of work has passed."""


class Run:
    """One process of a run: advances the time for each decision."""

    def __init__(self, config: Config, world: World, files: Files) -> None:
        self.config, self.world, self.files = config, world, files
        self.now_s, self.step = files.used_s, files.step
        # A resumed run trains later steps again.
        files.metrics[:] = [row for row in files.metrics if row["step"] <= self.step]
        files.journal[:] = [
            entry
            for entry in files.journal
            if entry["event"] != "evaluated" or entry["step"] <= self.step
        ]
        self.skills = np.random.default_rng(world.seed).uniform(0.1, 0.9, 1000)
        self.loaded, self.tested = self.step, False
        self.ended = False
        self.spend("start")
        self.ready_s = self.now_s
        self.deadline = Deadline(
            None,
            config.budget.time_s,
            prompts=(config.rollout.prompts_per_step, config.rollout.fewest_prompts),
            validates=config.eval.validates,
        )
        self.deadline.recall(files.metrics, sft_steps=0)
        self.saved = max((e["step"] for e in files.events("checkpoint")[-1:]), default=-1)
        self.controller = RunController(
            config,
            self.deadline,
            entries=list(files.journal),
            step=self.step,
            began_s=self.now_s,
            used_before_s=files.used_s,
            test_prompts=PROMPTS,
        )

    def run(self) -> None:
        """The loop of the coordinator.

        Raises:
            BudgetTooSmallError: if the controller refuses the budget.
            Killed: at the moment at which the process is killed.
        """
        self.duties()
        while step := self.decide(self.controller.next(self.status, self.now_s)):
            try:
                self.train(step)
            except Abandoned:
                self.decide_entry(self.controller.abandoned(self.now_s))
            self.duties()
        self.duties()
        assert self.ended

    def spend(
        self, name: str, *, share: float = 1.0, deadline: WorkDeadline | None = None
    ) -> float:
        """Advances the time by the duration of a call; returns its seconds."""
        seconds = self.world.takes_s(name, now_s=self.now_s, share=share)
        until_s = float("inf") if deadline is None else deadline.until_s
        if until_s <= self.now_s:
            raise Abandoned
        end_s = min(self.now_s + seconds, until_s)
        if name == "update":
            self.world.updates.append((self.now_s, end_s))
        if self.world.kills and end_s > self.world.kills[0]:
            self.files.used_s = max(self.world.kills.pop(0), self.now_s)
            raise Killed
        abandoned = self.now_s + seconds > until_s
        self.now_s = end_s
        if abandoned:
            raise Abandoned
        return seconds

    # --- decisions

    @property
    def status(self) -> RunStatus:
        files, validations = self.files, self.files.evaluated("validation")
        evaluated = {entry["step"] for entry in files.events("evaluated")}
        exported = files.exported
        return RunStatus(
            self.step,
            validated=frozenset(validations),
            best=None if files.best is None else BestVersion(files.best, f"{files.best}"),
            exported=None
            if exported is None
            else Exported(exported, f"{exported}", exported in evaluated),
            loaded_sha256=f"{self.loaded}",
            tested=self.tested,
        )

    def decide(self, decision: Any) -> Any:
        for entry in () if decision is None else decision.journal:
            self.decide_entry(entry)
        return decision

    def decide_entry(self, entry: Any) -> None:
        self.write(entry.event, **entry.facts)

    def write(self, event: str, **facts: Any) -> None:
        self.files.journal.append({"event": event, **facts})

    def measured(self, part: str, seconds: float) -> None:
        self.controller.observe(part, seconds)
        if part not in {SYNC, CHECKPOINT}:
            self.write("reserved", reason=part, seconds=seconds, elapsed_s=self.now_s)

    # --- work

    def train(self, step: TrainStep) -> None:
        began_s, share = self.now_s, step.prompts / self.config.rollout.prompts_per_step
        sampled_s = self.spend("train", share=share, deadline=step.deadline)
        sampled_s += self.spend("score", deadline=step.deadline)
        if self.decide(self.controller.may_update(self.status, sampled_s, self.now_s)) is None:
            raise Abandoned
        update_s = self.spend("update", share=share)
        self.controller.observe_update(step, update_s)
        self.measured(SYNC, self.spend("publish"))
        self.step = self.loaded = step.number + 1
        row = {"time/step_s": self.now_s - began_s, "time/learn_s": update_s}
        self.files.metrics.append(
            {"step": self.step, "rollout/prompts_planned": step.prompts} | row
        )

    def duties(self) -> None:
        while duty := self.decide(self.controller.due(self.status, self.now_s)):
            try:
                self.perform(duty)
            except Abandoned:
                self.decide_entry(self.controller.abandoned(self.now_s))

    def perform(self, duty: Duty) -> None:
        getattr(self, f"_{duty.kind}")(duty)

    def _check_parity(self, _: Duty) -> None:
        self.spend("publish")
        self.measured(SYNC, self.spend("publish"))

    def _evaluate_before(self, duty: Duty) -> None:
        if 0 not in self.files.evaluated("test_before"):
            seconds = self.spend("test", deadline=duty.deadline)
            self.measured(evaluation_part("test"), seconds)
            self.evaluated("test_before", 0)

    def _validate(self, duty: Duty) -> None:
        seconds = self.spend("validation", deadline=duty.deadline)
        best = self.files.best
        if best is None or self.skills[self.step] > self.skills[best]:
            self.save()
            self.files.best = self.step
        self.measured(VALIDATION, seconds)
        self.evaluated("validation", self.step)

    def _export(self, duty: Duty) -> None:
        seconds = self.spend("export")
        self.files.exported = self.files.best if duty.adapter == "best" else self.step
        self.measured(EXPORT, seconds)
        self.write("exported", version=self.files.exported, reason=duty.reason, seconds=seconds)

    def _checkpoint(self, _: Duty) -> None:
        self.save()

    def _load_best(self, _: Duty) -> None:
        if self.files.best not in {None, self.step}:
            self.spend("publish")
            self.loaded = self.files.best or 0

    def _refuse(self, duty: Duty) -> None:
        assert duty.error is not None
        raise duty.error

    def _summarize(self, _: Duty) -> None:
        self.ended = True

    def _recover_best(self, _: Duty) -> None:
        """Files are never lost in the simulation."""

    def _test(self, duty: Duty) -> None:
        pieces = (1.0,) if duty.share == 1 else _TEST_PIECES
        done = 0.0
        try:
            for piece in pieces:
                self.spend("test", share=duty.share * piece, deadline=duty.deadline)
                done += piece
        except Abandoned:
            pass
        self.tested = done > 0
        if self.tested:
            self.evaluated("test_after", self.loaded)

    def evaluated(self, name: str, version: int) -> None:
        accuracy = float(self.skills[version % 1000])
        self.write("evaluated", name=name, step=version, accuracy=accuracy)

    def save(self) -> None:
        seconds = 0.0 if self.step in self.files.checkpoints else self.spend("save")
        self.files.checkpoints.add(self.step)
        if self.step != self.saved:
            self.measured(CHECKPOINT, seconds)
        self.saved = self.step
        self.write("checkpoint", step=self.step, seconds=seconds)


@dataclass
class Ended:
    """The last process of a run, how it ended, and the minimum if the budget was refused."""

    last: Run
    how: str
    minimum_s: float | None = None


def scenario(seed: int) -> Scenario:
    """Budget, durations and faults of a scenario."""
    rng = np.random.default_rng([20261122, seed])
    budget_s = round(float(np.exp(rng.uniform(np.log(60), np.log(_DAY_S)))))
    # This share of the budget is taken by the start and two each of tests, validations and exports.
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
        # Sampling and scoring can be abandoned, however long they stall.
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


def config_of(found: Scenario) -> Config:
    return make_config(Path("runs"), **found.tables)


def run(found: Scenario) -> Ended:
    """Runs a scenario, resuming it after each kill."""
    config, files = config_of(found), Files()
    while True:
        try:
            process = Run(config, found.world, files)
        except Killed:
            continue
        try:
            process.run()
        except BudgetTooSmallError as refused:
            return Ended(process, "refused", refused.minimum_s)
        except Killed:
            continue
        return Ended(process, "finished")


def check_export(ended: Ended, *, budget_s: float) -> None:
    """Checks that the export is in time, evaluated, and the best validated version."""
    files = ended.last.files
    version = files.exported
    assert version in {entry["step"] for entry in files.events("evaluated")}
    placed = [entry for entry in files.events("reserved") if entry["reason"] == EXPORT]
    assert placed
    assert placed[-1]["elapsed_s"] <= budget_s
    accuracy: Mapping[int, float] = files.evaluated("validation")
    if accuracy:
        assert version is not None
        assert accuracy[version] == max(accuracy.values())
    else:
        assert version in {0, ended.last.step}


def check_idle(ended: Ended, config: Config, *, world: World) -> None:
    """Checks that at most 5% of the budget or one step, whichever is larger, is left unused.

    A step includes its validation here. Not counted as idle: time reserved for exporting a last
    version that was not the best; the time by which the last export was faster than the one before;
    two standard deviations of the noise of the last step and the evaluations.
    """
    deadline, files = ended.last.deadline, ended.last.files
    steps = [row["time/step_s"] for row in files.metrics]
    smallest = config.rollout.fewest_prompts / config.rollout.prompts_per_step
    step_s = max([*steps[-5:], deadline.step_time.expected_s(share=smallest)])
    step_s += deadline.shutdown.part_s(VALIDATION)
    idle_s = world.budget_s - ended.last.now_s
    idle_s -= 2 * world.noise * (step_s + deadline.tests_s)
    *_, before_s, last_s = 0.0, *deadline.shutdown.measured[EXPORT]
    idle_s -= max(0.0, before_s - last_s)
    exported = [entry["reason"] for entry in files.events("exported")]
    if exported[-1:] not in (["best"], ["last"]):
        idle_s -= SAFETY * deadline.export_s
    shares = idle_s / world.budget_s, idle_s / step_s
    assert idle_s <= max(0.05 * world.budget_s, step_s), shares


def check_decay(ended: Ended) -> None:
    """Checks that at half of the run the planned number of steps is about the final one.

    Except for steps lost to exports before the end, which no plan foresees.
    """
    files = ended.last.files
    steps = [row["time/step_s"] for row in files.metrics]
    early = [entry["seconds"] for entry in files.events("exported") if entry["reason"] == "better"]
    done = len(steps)
    plans = [entry for entry in files.events("planned") if entry["step"] <= done // 2]
    planned, most = plans[-1]["total_steps"], max(2, _ROUGHLY * done)
    assert -most <= planned - done <= most + sum(early) / min(steps), (planned, done)


def check(seed: int) -> str:
    """Runs a scenario and checks all properties; returns how it ended."""
    found = scenario(seed)
    config = config_of(found)
    budget_s = float(found.world.budget_s)
    killed = bool(found.world.kills)
    ended = run(found)
    files = ended.last.files
    if ended.how == "refused":
        assert not files.metrics
        assert ended.minimum_s is not None
        assert ended.minimum_s > budget_s or killed
        if files.evaluated("test_before"):
            check_export(ended, budget_s=float("inf"))
        return "refused"
    least_s = ended.last.deadline.reserve_for_export_s(tests=False)
    if killed and ended.last.ready_s + 2 * least_s > budget_s:
        # Killed too late to start again in time.
        check_export(ended, budget_s=float("inf"))
        return "late"
    # An update cannot be abandoned; earlier exports stay.
    stuck = any(begun <= budget_s < done + 2 * least_s for begun, done in found.world.updates)
    assert ended.last.now_s <= budget_s + 1e-6 or stuck
    check_export(ended, budget_s=budget_s)
    # An abandoned step uses up the time left, and no step follows it.
    if not files.events("abandoned"):
        check_idle(ended, config, world=found.world)
        mishaps = killed or bool(found.world.stalls)
        # The first plan is an estimate; if step times change, later plans are better.
        if not mishaps and len(files.metrics) > 3 and found.world.drift == 1:
            check_decay(ended)
    return "finished"


@pytest.mark.parametrize("part", range(FILES))
def test_invariant_10_the_deadline_is_kept_in_simulated_time(part: int):
    per = SCENARIOS // FILES
    for seed in range(part * per, (part + 1) * per):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"scenario {seed}: {error!r}") from error


def test_the_scenarios_cover_finished_and_refused_runs():
    ways = [check(seed) for seed in range(60)]
    assert ways.count("finished") > 30
    assert ways.count("refused") > 3
