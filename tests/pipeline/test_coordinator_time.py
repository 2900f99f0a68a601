"""Runs with a time budget in simulated time: the coordinator with workers that only sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from pipeline.budget import used_s
from pipeline.deadline import BudgetTooSmallError
from pipeline.rollout import dispatch
from pipeline.run.run_folder import RunFolder
from tests.run_process import Killed, Script
from tests.samples import PROMPTS, make_config, make_data
from tests.stub_workers import Disk, StubRun, VirtualLoop

START = "start"
TRAIN, VALIDATION, TEST = (f"sampler0.generate:{one}" for one in ("train", "validation", "test"))
SCORE, UPDATE, EXPORT = "scorer.score", "learner.update", "learner.export"
SECONDS = {START: 6.0, TEST: 40.0, VALIDATION: 20.0, TRAIN: 10.0, SCORE: 3.0, UPDATE: 20.0}
SECONDS |= {"learner.publish": 1.0, "learner.save": 2.0, EXPORT: 5.0}
"""Seconds of a call, by the first word of its name."""
STEP_S = 34.0
_DRIFTING = {TRAIN, VALIDATION, TEST, UPDATE}


@pytest.fixture(autouse=True)
def without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated sampler reports nothing before it ends: not to ask is ten times as fast."""
    monkeypatch.setattr(dispatch, "REPORT_S", 1e6)


@dataclass
class World:
    """Durations and failures of a simulated run; times are on the run's clock.

    Attributes:
        seconds: as `SECONDS`.
        budget_s: the run's time budget.
        seed: of the noise.
        drift: factor by which calls that depend on the policy are slower at the end of the budget.
        stalls: seconds added to the nth call of a name.
        kills: times at which processes are killed.
        noise: standard deviation of the logarithm of a call's seconds.
        once_s: seconds of the start that a restart does not repeat.
    """

    seconds: dict[str, float]
    budget_s: float
    seed: int = 1
    drift: float = 1.0
    stalls: dict[tuple[str, int], float] = field(default_factory=dict)
    kills: list[float] = field(default_factory=list)
    noise: float = 0.0
    once_s: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)

    def takes_s(self, name: str, *, now_s: float, share: float) -> float:
        """Seconds of the next call of this name, if it starts now."""
        count = self.calls[name] = self.calls.get(name, 0) + 1
        rng = np.random.default_rng([self.seed, len(name), sum(name.encode()), count])
        seconds = self.seconds.get(name, 0.0) * float(np.exp(self.noise * rng.standard_normal()))
        if name in _DRIFTING:
            passed = min(now_s / self.budget_s, 1.0)
            seconds *= self.drift**passed * (0.05 + 0.95 * share)
        return seconds + self.stalls.get((name, count), 0.0)


class Timeline(Script):
    """One process of a simulated run, in which calls sleep."""

    def __init__(self, world: World, config: Config) -> None:
        super().__init__()
        self.world, self.full = world, config.rollout.prompts_per_step
        self.used_s = used_s(RunFolder.of(config))
        self.clock = lambda: asyncio.get_running_loop().time()  # type: ignore[assignment]

    async def call(self, name: str, *, prompts: int = 0) -> None:
        """Sleeps for the duration of a call.

        Raises:
            Killed: when the process is killed during the call.
        """
        part = name.partition(" ")[0]
        share = prompts / (self.full if part in {TRAIN, UPDATE} else PROMPTS)
        now_s = self.used_s + self.clock()
        seconds = self.world.takes_s(part, now_s=now_s, share=share)
        kill_s = self.world.kills[0] if self.world.kills else float("inf")
        if now_s + seconds > kill_s:
            await asyncio.sleep(max(kill_s - now_s, 0.0))
            raise Killed
        await asyncio.sleep(seconds)
        self.note(name)


class Simulated:
    """One process of a run in simulated time.

    Attributes:
        process: the process.
        ended: "finished", "killed" or "refused".
        minimum_s: of a budget that was refused.
    """

    process: StubRun
    minimum_s: float

    def __init__(
        self, config: Config, world: World, disk: Disk, skills: Sequence[float] | None = None
    ) -> None:
        self.folder = RunFolder.of(config)
        skills = skills or np.random.default_rng(world.seed).uniform(0.1, 0.9, 1000).tolist()

        async def run() -> str:
            script = Timeline(world, config)
            await script.call(START)
            data = make_data(train=PROMPTS, validation=PROMPTS, test=PROMPTS)
            self.process = StubRun(config, disk=disk, data=data, script=script, started=0.0)
            self.process.deadline.once_s = world.once_s
            self.process.worker.skill = lambda version: skills[min(version, len(skills) - 1)]
            try:
                return await self.process.coordinator.run()
            finally:
                self.process.folder.close()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            try:
                self.ended = runner.run(run())
            except Killed:
                self.ended = "killed"
                killed_s = world.kills.pop(0)
                if self.folder.holds_run:
                    self.folder.record_used_s(killed_s)
            except BudgetTooSmallError as error:
                self.ended, self.minimum_s = "refused", error.minimum_s

    @property
    def summary(self) -> dict[str, Any]:
        return self.process.summary

    @property
    def rates(self) -> list[float]:
        """Learning rates of the updates."""
        return [rate for rate in self.process.worker.rates if rate is not None]

    @property
    def exports(self) -> list[tuple[int, str]]:
        return [(entry["version"], entry["reason"]) for entry in self.folder.events("exported")]


def config_of(folder: Path, budget_s: int, **tables: Any) -> Config:
    given: dict[str, Any] = {
        "budget": {"steps": None, "time": f"{budget_s}s"},
        "checkpoint": {"every_steps": 100},
    }
    return make_config(folder, **(given | tables))


def validated(folder: Path, budget_s: int, **tables: Any) -> Config:
    given: dict[str, Any] = {
        "data": {"validation": {"path": "validation.jsonl"}},
        "eval": {"every_steps": 2},
    }
    return config_of(folder, budget_s, **(given | tables))


def simulated(
    config: Config, *, disk: Disk | None = None, skills: list[float] | None = None, **world: Any
) -> Simulated:
    """A process without noise, whose versions have these skills."""
    found = World(SECONDS, config.budget.time_s or 1, **world)
    return Simulated(config, found, {} if disk is None else disk, skills)


@pytest.mark.parametrize("once_s", [0.0, 4.0])
@pytest.mark.parametrize("budget_s", range(180, 400, 50))
def test_promise_6_a_time_budget_is_kept_and_used(tmp_path: Path, budget_s: int, once_s: float):
    run = simulated(validated(tmp_path, budget_s), once_s=once_s)
    assert run.ended == "finished"
    found = run.summary
    assert found["deadline_s"] == budget_s
    unused_s = budget_s - found["wall_s"]
    # A restart (6 s of start, two syncs), an export, a checkpoint and a sync that were not needed,
    # and less than a step with its validation or 5%.
    assert run.process.deadline.restart_s == pytest.approx(8 - once_s)
    assert 0 <= unused_s < 8 - once_s + 5 + 3 + max(STEP_S + 20, 0.05 * budget_s)
    # With hardly a second left, the last quarter of the tests may be missing.
    assert found["eval"]["after"]["n"] >= 0.75 * PROMPTS
    assert run.exports[-1][0] == found["best"]["step"]


def test_promise_6_the_export_follows_each_better_validation(tmp_path: Path):
    skills = [0.2, 0.2, 0.5, 0.5, 0.3, 0.3, 0.9, 0.8]
    run = simulated(validated(tmp_path, 500), skills=skills)
    assert run.exports == [(0, "first"), (2, "better"), (6, "better")]
    assert run.summary["best"]["step"] == 6
    # The untrained policy was exported before the first step.
    calls = run.process.script.calls
    assert calls.index("learner.export 0") < calls.index("sampler0.generate:train 0")


@pytest.mark.parametrize("call", [TRAIN, SCORE])
def test_a_step_that_stalls_is_abandoned_in_time_for_the_end(tmp_path: Path, call: str):
    number = 5 if call == SCORE else 3  # the answers of two validations are scored, too
    run = simulated(validated(tmp_path, 400), stalls={(call, number): 1e6})
    assert run.ended == "finished"
    assert run.summary["steps"] == 2
    assert [entry["step"] for entry in run.folder.events("abandoned")] == [2]
    assert run.summary["eval"]["after"]["n"] == PROMPTS
    assert run.summary["wall_s"] <= 400
    assert ("sampler0.abort" in run.process.script.calls) is (call == TRAIN)
    assert ("sampler0.resume" in run.process.script.calls) is (call == TRAIN)


def test_the_final_evaluation_is_shortened_and_the_export_kept(tmp_path: Path):
    # The last update takes 25 s longer than the others, with 11 s to spare.
    run = simulated(config_of(tmp_path, 250), stalls={(UPDATE, 4): 25.0})
    (entry,) = run.folder.events("evaluation_shortened")
    found = run.summary["eval"]
    assert 0 < entry["prompts"] < entry["of"] == PROMPTS
    assert found["before"]["n"] == found["after"]["n"] == entry["prompts"]
    assert run.exports[-1] == (4, "last")
    assert run.summary["wall_s"] <= 250


def test_the_last_steps_have_fewer_prompts_where_time_is_short(tmp_path: Path):
    rollout = {"prompts_per_step": 4, "min_prompts_per_step": 1}
    run = simulated(config_of(tmp_path, 265, rollout=rollout))
    prompts = [row["rollout/prompts_planned"] for row in run.folder.metrics]
    assert prompts == [4, 4, 4, 4, 2]
    last = run.folder.read_rollouts("step_000005")
    assert len({row["prompt_id"] for row in last}) == 2
    assert run.summary["wall_s"] <= 265


def test_an_alarm_on_the_last_validation_is_raised_at_the_end(tmp_path: Path):
    tables = {"budget": {"steps": 2}, "alarms": {"stop": ["validation_falls"]}}
    run = simulated(validated(tmp_path, 1, **tables), skills=[0.9, 0.9, 0.1])
    assert run.ended == "finished"
    (alarm,) = (one for one in run.folder.events("alarm") if one["rule"] == "validation_falls")
    assert (alarm["step"], alarm["action"]) == (2, "log")


def test_an_unevaluated_version_does_not_replace_an_evaluated_export(tmp_path: Path):
    # Without a validation split, and with a final test that never ends.
    run = simulated(config_of(tmp_path, 250), stalls={(TEST, 2): 1e6})
    assert run.exports == [(0, "first")]
    assert "after" not in run.summary["eval"]
    assert run.summary["wall_s"] <= 250


def test_a_finished_run_with_too_small_an_extension_keeps_its_result(tmp_path: Path):
    disk: Disk = {}
    first = simulated(validated(tmp_path, 250), disk=disk)
    assert first.ended == "finished"
    before, export = first.summary, first.exports
    assert before["eval"]["after"]["n"] == PROMPTS
    second = simulated(validated(tmp_path, 255), disk=disk)
    assert second.ended == "finished"
    after = second.summary
    assert (after["deadline_s"], after["resumed_from"]) == (255, before["steps"])
    for key in ("ended", "steps", "eval", "best", "adapter_sha256"):
        assert after.get(key) == before.get(key)
    assert second.exports == export
    assert not any("test" in call for call in second.process.script.calls)


@pytest.mark.parametrize(("make", "more_s"), [(config_of, -20), (validated, 10)])
def test_promise_6_a_run_of_steps_resumed_with_a_deadline_is_exported(
    tmp_path: Path, make: Any, more_s: int
):
    disk: Disk = {}
    steps = {"budget": {"steps": 60}, "checkpoint": {"every_steps": 1}}
    killed = simulated(make(tmp_path, 1, **steps), disk=disk, kills=[200.0])
    assert (killed.ended, killed.exports) == ("killed", [])
    done = max(disk)
    run = simulated(make(tmp_path, 200 + more_s), disk=disk)
    assert run.ended == "finished"
    assert (run.summary["steps"], "after" in run.summary["eval"]) == (done, False)
    (export,) = run.exports
    assert export[0] == (run.summary["best"]["step"] if make is validated else done)


def test_promise_6_a_budget_below_the_minimum_is_refused_and_the_minimum_suffices(tmp_path: Path):
    disk: Disk = {}
    run = simulated(validated(tmp_path / "a", 130), disk=disk)
    assert (run.ended, run.folder.metrics) == ("refused", [])
    assert run.exports == [(0, "first")]
    for name, checkpoints in (("a", disk), ("b", {})):  # continued, or a new run
        again = simulated(validated(tmp_path / name, int(run.minimum_s) + 1), disk=checkpoints)
        assert again.ended == "finished"
        assert again.summary["steps"] >= 1
    # A budget that ends within the first evaluation.
    small = simulated(validated(tmp_path / "c", 30))
    assert (small.ended, small.exports) == ("refused", [])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_decay_goes_on_after_a_kill_and_ends_with_the_budget(tmp_path: Path, schedule: str):
    config = validated(tmp_path, 2000, learner={"schedule": schedule, "lr": 1.0})
    disk: Disk = {}
    first = simulated(config, disk=disk, drift=3.0, kills=[1000.0])
    assert (first.ended, first.rates[0]) == ("killed", 1.0)
    second = simulated(config, disk=disk)
    assert second.ended == "finished"
    # Half of the time was used: lower rates than at first for steps that are done again.
    assert 0.4 < second.rates[0] < 0.6
    for rates in (first.rates, second.rates):
        assert rates == sorted(rates, reverse=True)
        assert len(rates) > 10
    assert 0 < second.rates[-1] < 2.5 / len(second.rates)


@pytest.mark.parametrize(
    "seed",
    [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 50))],
)
def test_promise_6_deadlines_are_kept_with_noise_drift_stalls_and_kills(tmp_path: Path, seed: int):
    rng = np.random.default_rng(seed)
    budget_s = int(np.exp(rng.uniform(np.log(300), np.log(3000))))
    make = validated if rng.random() < 0.7 else config_of
    config = make(tmp_path, budget_s, checkpoint={"every_steps": int(rng.integers(1, 9))})
    world = World(
        SECONDS | {EXPORT: float(rng.choice([5.0, 40.0]))},
        budget_s,
        seed,
        drift=float(np.exp(rng.uniform(np.log(0.3), np.log(3.0)))),
        stalls={(str(rng.choice([TRAIN, VALIDATION])), int(rng.integers(2, 6))): 1e6},
        kills=sorted(rng.uniform(0, budget_s, int(rng.integers(0, 3)))),
        noise=0.05,
    )
    disk: Disk = {}
    while (run := Simulated(config, world, disk)).ended == "killed":
        pass
    assert (run.ended, run.folder.export.is_dir()) == ("finished", True)
    assert run.summary["wall_s"] <= budget_s
    version, _ = run.exports[-1]
    assert version == run.summary.get("best", {"step": version})["step"]
