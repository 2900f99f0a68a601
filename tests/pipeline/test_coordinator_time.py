"""Runs with a time budget in simulated time without noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from pipeline.deadline import BudgetTooSmallError
from tests.fakes import Disk
from tests.samples import PROMPTS, make_config, make_data
from tests.simulation import TimedProcess, World

SECONDS = {
    "start": 6.0,
    "test": 40.0,
    "validation": 20.0,
    "train": 10.0,
    "score": 3.0,
    "update": 20.0,
    "publish": 1.0,
    "save": 2.0,
    "export": 5.0,
}
# 7 s of start and sync of the probe, 1 s of sync, 40 s of tests, 5 s of export, and with a
# validation split 20 s of validation and 2 s of checkpoint.
BEFORE_S, BEFORE_VALIDATED_S = 53.0, 75.0
STEP_S = 34.0


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


def process_of(
    config: Config, *, disk: Disk | None = None, skills: list[float] | None = None, **world: Any
) -> TimedProcess:
    seconds = SECONDS | world.pop("seconds", {})
    found = World(seed=1, seconds=seconds, budget_s=config.budget.time_s or 1, noise=0.0, **world)
    data = make_data(train=PROMPTS, validation=PROMPTS, test=PROMPTS)
    process = TimedProcess(config, world=found, disk=Disk() if disk is None else disk, data=data)
    if skills is not None:
        process.samplers[0].skill = lambda version: skills[min(version, len(skills) - 1)]
    return process


def summary(process: TimedProcess) -> dict[str, Any]:
    found = process.folder.summary
    assert found is not None
    return found


def exports(process: TimedProcess) -> list[tuple[int, str]]:
    return [(entry["version"], entry["reason"]) for entry in process.events("exported")]


def test_a_run_with_a_time_budget_by_hand(tmp_path: Path):
    process = process_of(config_of(tmp_path, 250))
    assert process.run_in_time() == "finished"
    # A step takes 34 s, the end 2 + 1 + 40 + 5 s: after 4 steps 250 - 189 = 61 s are left, too few.
    assert summary(process)["steps"] == 4
    assert summary(process)["wall_s"] == pytest.approx(BEFORE_S + 4 * STEP_S + 2 + 40 + 5)
    assert exports(process) == [(0, "first"), (4, "last")]
    reserved = [(entry["reason"], entry["seconds"]) for entry in process.events("reserved")]
    assert reserved == [
        ("test evaluation", 40.0),
        ("export", 5.0),
        ("export", 5.0),
    ]


@pytest.mark.parametrize("budget_s", [*range(180, 400, 13), 3600])
def test_promise_6_a_time_budget_is_kept_and_used(tmp_path: Path, budget_s: int):
    process = process_of(validated(tmp_path, budget_s))
    assert process.run_in_time() == "finished"
    found = summary(process)
    assert found["deadline_s"] == budget_s
    unused_s = budget_s - found["wall_s"]
    # An export that was not needed, and less than a step with its validation or 5%.
    assert 0 <= unused_s < 6 + max(STEP_S + 20, 0.05 * budget_s)
    # With hardly a second left, the last quarter of the tests may be missing.
    assert found["eval"]["after"]["n"] >= 0.75 * PROMPTS
    assert exports(process)[-1][0] == found["best"]["step"]


def test_promise_6_the_export_follows_each_better_validation(tmp_path: Path):
    skills = [0.2, 0.2, 0.5, 0.5, 0.3, 0.3, 0.9, 0.8]
    process = process_of(validated(tmp_path, 500), skills=skills)
    process.run_in_time()
    assert exports(process) == [(0, "first"), (2, "better"), (6, "better")]
    assert summary(process)["best"]["step"] == 6
    # The untrained policy was exported before the first step.
    calls = process.script.calls
    assert calls.index("learner.export 0") < calls.index("sampler0.generate:train 0")


def test_slow_exports_are_rarer_and_still_meet_the_deadline(tmp_path: Path):
    skills = [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8]
    config = validated(tmp_path, 1200)
    process = process_of(config, skills=skills, seconds={"export": 60.0})
    process.run_in_time()
    done = exports(process)
    # At 5% of the time, an export is due every 1200 s of the run; the last ones are near the end.
    assert done[0] == (0, "first")
    assert len(done) < 1 + len(process.events("evaluated"))
    assert done[-1][0] == summary(process)["best"]["step"]
    assert summary(process)["wall_s"] <= 1200


@pytest.mark.parametrize("call", ["train", "score"])
def test_a_step_that_stalls_is_abandoned_in_time_for_the_end(tmp_path: Path, call: str):
    number = 5 if call == "score" else 3  # the answers of two validations are scored, too
    process = process_of(validated(tmp_path, 400), stalls={(call, number): 1e6})
    assert process.run_in_time() == "finished"
    assert summary(process)["steps"] == 2
    assert [entry["step"] for entry in process.events("abandoned")] == [2]
    assert summary(process)["eval"]["after"]["n"] == PROMPTS
    assert summary(process)["wall_s"] <= 400
    assert ("sampler0.abort" in process.script.calls) is (call == "train")
    assert ("sampler0.resume" in process.script.calls) is (call == "train")


def test_a_validation_that_stalls_is_abandoned_too(tmp_path: Path):
    process = process_of(validated(tmp_path, 400), stalls={("validation", 2): 1e6})
    assert process.run_in_time() == "finished"
    assert summary(process)["steps"] == 2
    assert summary(process)["best"]["step"] == 0
    assert summary(process)["wall_s"] <= 400


def test_the_final_evaluation_is_shortened_and_the_export_kept(tmp_path: Path):
    # The last update takes 25 s longer than the others, with 11 s to spare.
    process = process_of(config_of(tmp_path, 250), stalls={("update", 4): 25.0})
    process.run_in_time()
    (entry,) = process.events("evaluation_shortened")
    found = summary(process)["eval"]
    assert 0 < entry["prompts"] < entry["of"] == PROMPTS
    assert found["before"]["n"] == found["after"]["n"] == entry["prompts"]
    assert exports(process)[-1] == (4, "last")
    assert summary(process)["wall_s"] <= 250


def test_an_unevaluated_version_does_not_replace_an_evaluated_export(
    tmp_path: Path,
):
    # Without a validation split, and with a final test that never ends.
    process = process_of(config_of(tmp_path, 250), stalls={("test", 2): 1e6})
    process.run_in_time()
    assert exports(process) == [(0, "first")]
    assert "after" not in summary(process)["eval"]
    assert summary(process)["wall_s"] <= 250


@pytest.mark.parametrize("make", [config_of, validated])
def test_a_finished_run_with_too_small_an_extension_keeps_its_result(tmp_path: Path, make: Any):
    disk = Disk()
    first = process_of(make(tmp_path, 250), disk=disk)
    assert first.run_in_time() == "finished"
    before, export = summary(first), exports(first)
    assert before["eval"]["after"]["n"] == PROMPTS
    second = process_of(make(tmp_path, 255), disk=disk)
    assert second.run_in_time() == "finished"
    after = summary(second)
    assert (after["deadline_s"], after["resumed_from"]) == (255, before["steps"])
    for key in ("ended", "steps", "eval", "best", "adapter_sha256"):
        assert after.get(key) == before.get(key)
    assert exports(second) == export
    assert not any("test" in call for call in second.script.calls)


def test_a_run_of_steps_resumed_with_too_little_time_is_not_refused(tmp_path: Path):
    config, disk = make_config(tmp_path, budget={"steps": 3}), Disk()
    first = process_of(config, disk=disk)
    first.run_in_time()
    second = process_of(config_of(tmp_path, int(summary(first)["wall_s"]) + 10), disk=disk)
    assert second.run_in_time() == "finished"
    assert summary(second)["eval"] == summary(first)["eval"]
    assert exports(second) == [(3, "last")]


def steps_killed(folder: Path, make: Any, disk: Disk) -> int:
    """A run of steps that was killed after 200 s; returns the number of its steps."""
    tables = {"budget": {"steps": 60}, "checkpoint": {"every_steps": 1}}
    process = process_of(make(folder, 1, **tables), disk=disk, kills=[200.0])
    assert process.run_in_time() == "killed"
    assert exports(process) == []
    return max(disk)


@pytest.mark.parametrize("make", [config_of, validated])
@pytest.mark.parametrize("more_s", [-20, 10])
def test_promise_6_a_run_of_steps_resumed_with_a_deadline_is_exported(
    tmp_path: Path, make: Any, more_s: int
):
    disk = Disk()
    done = steps_killed(tmp_path, make, disk)
    process = process_of(make(tmp_path, 200 + more_s), disk=disk)
    assert process.run_in_time() == "finished"
    assert (summary(process)["steps"], "after" in summary(process)["eval"]) == (done, False)
    (export,) = exports(process)
    expected = summary(process)["best"]["step"] if make is validated else done
    assert export[0] == expected


def test_an_unevaluated_version_replaces_an_unevaluated_export(tmp_path: Path):
    disk = Disk()
    done = steps_killed(tmp_path, config_of, disk)
    # The first test answers are needed for comparing the export.
    process = process_of(config_of(tmp_path, 450), disk=disk, stalls={("test", 2): 1e6})
    process.run_in_time()
    assert "after" not in summary(process)["eval"]
    assert summary(process)["steps"] > done
    assert exports(process) == [(done, "first"), (summary(process)["steps"], "last")]
    assert summary(process)["wall_s"] <= 450


def test_a_smaller_step_uses_the_remaining_time_if_configured(tmp_path: Path):
    rollout = {"prompts_per_step": 4, "min_prompts_per_step": 1}
    process = process_of(config_of(tmp_path, 265, rollout=rollout))
    process.run_in_time()
    prompts = [row["rollout/prompts_planned"] for row in process.folder.metrics]
    assert prompts[:-1] == [4] * (len(prompts) - 1)
    assert prompts[-1] < 4
    rows = process.folder.read_rollouts(f"step_{len(prompts):06d}") or []
    assert len({row["prompt_id"] for row in rows}) == prompts[-1]


def test_a_budget_below_the_minimum_is_refused_and_the_minimum_suffices(tmp_path: Path):
    process = process_of(validated(tmp_path / "a", 130))
    with pytest.raises(
        BudgetTooSmallError, match=r"the minimum is about 2m\d+s.* is exported$"
    ) as no:
        process.run_in_time()
    assert process.folder.metrics == []
    assert exports(process) == [(0, "first")]
    again = process_of(validated(tmp_path / "b", int(no.value.minimum_s) + 1))
    assert again.run_in_time() == "finished"
    assert summary(again)["steps"] >= 1


def test_a_budget_that_ends_within_the_first_evaluation_is_refused(tmp_path: Path):
    process = process_of(validated(tmp_path, 30))
    with pytest.raises(BudgetTooSmallError, match="the minimum is about"):
        process.run_in_time()
    assert exports(process) == []


def test_a_resumed_time_budget_includes_used_time(tmp_path: Path):
    config, disk = config_of(tmp_path, 260, checkpoint={"every_steps": 2}), Disk()
    first = process_of(config, disk=disk, kills=[BEFORE_S + 3 * STEP_S + 3])
    assert first.run_in_time() == "killed"
    second = process_of(config, disk=disk)
    assert second.run_in_time() == "finished"
    # The third step was recorded and is trained again; no time is left after it.
    used_s = second.clock.used_before_s
    assert used_s == pytest.approx(BEFORE_S + 3 * STEP_S + 3)
    assert summary(second)["steps"] == 3
    assert summary(second)["wall_s"] <= 260


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_decay_ends_with_the_budget(tmp_path: Path, schedule: str):
    config = validated(tmp_path, 2000, learner={"schedule": schedule, "lr": 1.0})
    process = process_of(config, drift=3.0)
    process.run_in_time()
    rates = [rate for rate in process.learner.rates if rate is not None]
    assert len(rates) == summary(process)["steps"] > 10
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    assert 0 < rates[-1] < 2.5 / len(rates)


def test_the_decay_goes_on_after_a_kill(tmp_path: Path):
    config = validated(tmp_path, 2000, learner={"schedule": "linear", "lr": 1.0})
    disk = Disk()
    first = process_of(config, disk=disk, drift=3.0, kills=[1000.0])
    assert first.run_in_time() == "killed"
    second = process_of(config, disk=disk)
    assert second.run_in_time() == "finished"
    rates = [rate for rate in second.learner.rates if rate is not None]
    # Half of the time was used: lower rates than at first for steps that are done again.
    assert 0.4 < rates[0] < 0.6
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 2.5 / len(rates)


@pytest.mark.parametrize("seed", range(36))
def test_promise_6_deadlines_are_kept_with_noise_drift_stalls_and_kills(tmp_path: Path, seed: int):
    rng = np.random.default_rng(seed)
    budget_s = int(np.exp(rng.uniform(np.log(300), np.log(6000))))
    make = validated if rng.random() < 0.7 else config_of
    config = make(tmp_path, budget_s, checkpoint={"every_steps": int(rng.integers(1, 9))})
    world = World(
        seed,
        SECONDS | {"export": float(rng.choice([5.0, 40.0]))},
        budget_s,
        drift=float(np.exp(rng.uniform(np.log(0.3), np.log(3.0)))),
        stalls={(str(rng.choice(["train", "validation"])), int(rng.integers(2, 6))): 1e6},
        kills=sorted(rng.uniform(0, budget_s, int(rng.integers(0, 3)))),
    )
    disk, data = Disk(), make_data(train=PROMPTS, validation=PROMPTS, test=PROMPTS)
    while True:
        process = TimedProcess(config, world=world, disk=disk, data=data)
        if process.run_in_time() == "finished":
            break
    found = summary(process)
    assert found["wall_s"] <= budget_s
    assert process.folder.export.is_dir()
    version, _ = exports(process)[-1]
    assert version == found.get("best", {"step": version})["step"]
