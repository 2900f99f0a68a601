"""A run whose metric is a reward, without reference answers: errors, and changed rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Config
from launch.resume import record_changes
from pipeline.run.history import REWARDS_CHANGED
from rewards.base import Outcome, RewardInput
from tests.run_process import Script
from tests.samples import PROMPTS, make_config, make_data
from tests.stub_workers import Disk, StubRun

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
        assert one.answer is None
        if self.fails and one.prompt_id == 1:
            return Outcome.failed("raised", "ValueError: no style")
        return Outcome(1.0 if f"<answer>{2 * one.prompt_id}</answer>" in one.completion else 0.25)


def request(folder: Path, *, weight: float = 1.0, metric: str = "style") -> Config:
    """A run that is validated at each step, with one reward of this weight."""
    part = {"name": "style", "function": "rewards.format:well_formed", "weight": weight}
    return make_config(
        folder,
        data={"validation": {"path": "validation.jsonl"}},
        rewards={"functions": [part]},
        alarms={"excluded": "off"},
        eval={"every_steps": 1, "metric": metric},
        budget={"steps": len(SKILLS) - 1},
        checkpoint={"every_steps": 1},
    )


def styled(config: Config, disk: Disk) -> StubRun:
    data = make_data(validation=PROMPTS, test=PROMPTS)
    for name in ("train", "validation", "test"):
        split = getattr(data, name)
        prompts = tuple(replace(prompt, answer=None) for prompt in split.prompts)
        data = replace(data, **{name: replace(split, prompts=prompts)})
    run = StubRun(config, disk=disk, data=data)
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
