"""Evaluations during a run: when; which version is kept, tested and exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.colocated_actor import ColocatedActor
from configs.schema import Config
from launch.resume import record_changes
from pipeline.data.order import prompts_for_step
from pipeline.evaluate.recorded import is_better
from pipeline.run.history import REWARDS_CHANGED
from rewards.base import Outcome, RewardInput
from tests.real_actor import RealRun, real_config
from tests.run_process import Script
from tests.samples import PROMPTS, make_config, make_data
from tests.stub_workers import Disk, StubRun

STEPS = 10
COLLAPSE = 6


def skill(version: int) -> float:
    """A skill that grows with every step and collapses at 60% of the run."""
    return 0.2 + 0.1 * version if version < COLLAPSE else 0.05


USUAL: dict[str, Mapping[str, Any]] = {
    "data": {"validation": {"path": "validation.jsonl"}},
    "eval": {"every_steps": 1},
    "budget": {"steps": STEPS},
    "checkpoint": {"every_steps": 3},
}


def skilled(config: Config, disk: Disk | None = None) -> StubRun:
    data = make_data(validation=PROMPTS, test=PROMPTS, sets=[s.name for s in config.eval.sets])
    run = StubRun(config, disk=Disk() if disk is None else disk, data=data)
    run.worker.skill = skill
    return run


def collapsing(folder: Path, *, disk: Disk | None = None, **tables: Mapping[str, Any]) -> StubRun:
    """A run whose policy collapses, with a validation split."""
    return skilled(make_config(folder, **(USUAL | tables)), disk)


def test_the_best_version_of_a_collapsing_policy_is_exported(tmp_path: Path):
    run = collapsing(tmp_path)
    assert run.run() == "finished"
    summary = run.summary
    assert run.worker.version == summary["steps"] == STEPS
    assert "untrained_export" not in summary
    best = summary["best"]
    assert (best["step"], best["last_step"]) == (COLLAPSE - 1, STEPS)
    assert (best["accuracy"], best["last_accuracy"]) == (0.7, 0.05)
    assert best["paired_difference"] == pytest.approx(0.65)
    assert best["paired_p"] < 0.01
    # The best version is tested and exported, under its own version number.
    assert summary["eval"]["before"]["accuracy"] == 0.2
    assert summary["eval"]["after"]["accuracy"] == 0.7
    assert run.script.calls[-1] == f"learner.export {COLLAPSE - 1}"
    assert run.worker.best == (COLLAPSE - 1, summary["adapter_sha256"])
    (after,) = [e for e in run.events("evaluated") if e["name"] == "test_after"]
    assert after["step"] == COLLAPSE - 1  # the version that was evaluated, for the model card
    # The test split is evaluated once before and once after training.
    tests = [call for call in run.script.calls if "generate:test" in call]
    assert len(tests) == 2


def test_mean_rewards_of_other_rewards_do_not_compare():
    best = {"accuracy": 0.0, "reward": 0.1, "rewards_version": 0}
    found = {"accuracy": 0.0, "reward": 0.2, "rewards_version": 0}
    assert is_better(found, best)
    assert not is_better({**found, "rewards_version": 1}, best)
    assert not is_better({**found, "reward": None}, best)
    assert not is_better(found, {**best, "reward": None})
    assert is_better({**found, "accuracy": 0.1, "reward": 0.0}, best)
    assert not is_better(best, best)  # of equal ones the earliest
    assert is_better(found, None)
    assert not is_better({"score": None, "reward": 1.0}, None)


def test_an_untrained_export_is_said_loudly(tmp_path: Path):
    run = collapsing(tmp_path, budget={"steps": 2})
    run.worker.skill = lambda version: 0.8 - 0.1 * version
    run.run()
    assert "(2 validations over 2 steps, by 'exact_answer')" in run.summary["untrained_export"]


def test_further_sets_are_evaluated_before_and_after(tmp_path: Path):
    sets = [{"name": "forgotten", "path": "forgotten.jsonl"}]
    run = collapsing(tmp_path, eval={"every_steps": 1, "sets": sets})
    run.run()
    compared = run.summary["eval"]["sets"]["forgotten"]
    assert compared["before"]["accuracy"] == 0.2
    assert compared["after"]["accuracy"] == 0.7
    drawn = [call for call in run.script.calls if "generate:forgotten" in call]
    assert len(drawn) == 2
    reserved = {entry["reason"] for entry in run.events("reserved")}
    kinds = ("test", "forgotten", "validation")
    assert reserved == {"export", *(f"{kind} evaluation" for kind in kinds)}


def test_sft_steps_come_first_and_count(tmp_path: Path, actor: ColocatedActor):
    phases = {"phases": ["sft", "grpo"]}
    sft = {"train": {"path": "sft.jsonl"}, "steps": 2, "sequences_per_step": 2}
    run = RealRun(real_config(tmp_path, run=phases, sft=sft, budget={"steps": 4}), actor)
    assert run.run() == "finished"
    run.worker.close()
    assert [call for call in run.script.calls if "update" in call] == [
        *("sft_update 0", "sft_update 1", "update 2", "update 3"),
    ]
    assert [row["step"] for row in run.folder.metrics] == [1, 2, 3, 4]
    assert ["sft/loss" in row for row in run.folder.metrics] == [True] * 2 + [False] * 2
    # GRPO starts with the same data as without an SFT phase; the noise depends on the step.
    names = [rollout.completion.name for rollout in run.worker.seen[0]]
    prompts = prompts_for_step(run.data.train.prompts, seed=5, step=0, prompts_per_step=2)
    assert {name.prompt_id for name in names} == {prompt.id for prompt in prompts}
    assert {name.step for name in names} == {2}


# --- a reward as metric

SKILLS = [0.1, 0.9, 0.3, 0.5, 0.4]
"""Share of right answers by version."""


class StyleScorer:
    """Style is 1 for the doubled number, 0.25 for others."""

    fails = False

    def __init__(self, script: Script) -> None:
        self.script = script

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        self.script.note("scorer.score")
        return [{"style": self._style(one)} for one in inputs]

    async def notices(self) -> list[str]:
        return []

    async def busy_s(self) -> dict[str, float]:
        return {}

    def _style(self, one: RewardInput) -> Outcome:
        if self.fails and one.prompt_id == 1:
            return Outcome.failed("raised", "ValueError: no style")
        return Outcome(1.0 if f"<answer>{2 * one.prompt_id}</answer>" in one.completion else 0.25)


def request(folder: Path, *, weight: float = 1.0, metric: str = "style") -> Config:
    """A run that is validated at each step, with one reward of this weight."""
    part = {"name": "style", "function": "rewards.format:well_formed", "weight": weight}
    tables: dict[str, Mapping[str, Any]] = {
        "rewards": {"functions": [part]},
        "alarms": {"off": ["excluded"]},
        "eval": {"every_steps": 1, "metric": metric},
        "budget": {"steps": len(SKILLS) - 1},
        "checkpoint": {"every_steps": 1},
    }
    return make_config(folder, **(USUAL | tables))


def styled(config: Config, disk: Disk) -> StubRun:
    run = skilled(config, disk)
    run.worker.skill = lambda version: SKILLS[version]
    run.workers.scorer = StyleScorer(run.script)
    return run


def test_promise_5_an_error_in_an_evaluation_is_counted_and_is_not_a_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StyleScorer, "fails", True)
    run = styled(request(tmp_path), Disk())
    run.worker.skill = lambda _: 1.0
    run.run()
    (before,) = [one for one in run.events("evaluated") if one["name"] == "test_before"]
    assert (before["score"], before["n"], before["excluded"]) == (1.0, PROMPTS - 1, 1 / PROMPTS)
    (found,) = [
        one for one in run.events("evaluation_errors") if one["evaluation"] == "test_before"
    ]
    told = {"name": "style", "count": 1, "first": "raised: ValueError: no style"}
    assert found | told == found
    (failed, *_) = run.folder.read_rollouts(before["file"])
    assert (failed["score"], failed["errors"]) == (None, {"style": "raised: ValueError: no style"})


@pytest.mark.parametrize("metric", ["style", "reward"])
def test_after_an_accepted_change_of_rewards_the_best_version_is_searched_anew(
    tmp_path: Path, metric: str
):
    disk = Disk()
    first = styled(request(tmp_path, metric=metric), disk)
    first.script.on["learner.update 1"] = first.script.stop.set
    assert first.run() == "interrupted"
    heavier = request(tmp_path, metric=metric, weight=2.0)
    record_changes(first.folder, heavier, {}, step=max(disk))
    again = styled(heavier, disk)
    assert again.run() == "finished"
    (changed,) = again.events(REWARDS_CHANGED)
    changes = [["rewards.functions.style.weight", 1.0, 2.0]]
    assert changed == {"after_step": 2, "changes": changes}
    # Version 1 has the better style, by rewards that are no longer those of the run.
    best, found = again.summary["best"], again.summary["eval"]
    assert (best["step"], best["last_step"]) == (3, 4)
    assert again.script.calls[-1] == "learner.export 3"
    # The base is scored by the same rewards as the tuned policy.
    factor = 2 if metric == "reward" else 1
    means = [factor * (SKILLS[version] + 0.25 * (1 - SKILLS[version])) for version in (0, 3)]
    assert [found[name]["score"] for name in ("before", "after")] == pytest.approx(means)
    # A rollback to a step before the change does not bring the old validations back.
    again.folder.journal("resumed", step=1)
    process = styled(heavier, disk)
    assert process.coordinator.schedule.best is None
    process.folder.close()
