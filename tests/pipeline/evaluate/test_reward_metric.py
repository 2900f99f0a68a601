"""A run whose metric is a reward: the best version, its export, and changed rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.resume import record_changes
from pipeline.data.splits import LoadedSplit
from pipeline.run.history import REWARDS_CHANGED
from pipeline.run.run_folder import RunFolder
from rewards.base import Outcome, RewardInput
from tests.run_process import Script
from tests.samples import PROMPTS, make_config, make_data
from tests.stub_workers import Disk, StubRun

STYLE = {"name": "style", "function": "rewards.format:well_formed", "weight": 1.0}
FORMAT = {"name": "format", "function": "rewards.format:well_formed", "weight": 0.0}


class StyleScorer:
    """Style is 1 for the doubled number, 0.25 for others."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.fails = False

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        self.script.note("scorer.score")
        return [{"style": self._style(one), "format": Outcome(0.5)} for one in inputs]

    async def notices(self) -> list[str]:
        return []

    async def busy_s(self) -> dict[str, float]:
        return {}

    def _style(self, one: RewardInput) -> Outcome:
        assert one.answer is None
        right = f"<answer>{2 * one.prompt_id}</answer>" in one.completion
        if self.fails and one.prompt_id == 1:
            return Outcome.failed("raised", "ValueError: no style")
        return Outcome(1.0 if right else 0.25)


def unanswered(split: LoadedSplit) -> LoadedSplit:
    """The split without reference answers."""
    return replace(split, prompts=tuple(replace(prompt, answer=None) for prompt in split.prompts))


def styled(
    folder: Path,
    skills: Sequence[float],
    *,
    disk: Disk | None = None,
    script: Script | None = None,
    parts: Sequence[Mapping[str, Any]] = (STYLE, FORMAT),
    accept: bool = False,
    **tables: Mapping[str, Any],
) -> StubRun:
    """A run without reference answers whose versions have these skills, validated at each step."""
    usual: dict[str, Mapping[str, Any]] = {
        "data": {"validation": {"path": "validation.jsonl"}},
        "rewards": {"functions": list(parts)},
        "alarms": {"excluded": "off"},
        "eval": {"every_steps": 1, "metric": "style"},
        "budget": {"steps": len(skills) - 1},
        "checkpoint": {"every_steps": 1},
    }
    config = make_config(folder, **(usual | tables))
    data = make_data(validation=PROMPTS, test=PROMPTS)
    assert data.validation is not None
    without = {name: unanswered(getattr(data, name)) for name in ("train", "validation", "test")}
    data = replace(data, **without)
    disk = Disk() if disk is None else disk
    if accept:
        record_changes(RunFolder.of(config), config, {}, step=max(disk))
    process = StubRun(config, disk=disk, script=script, data=data)
    process.worker.skill = lambda version: skills[version]
    process.workers.scorer = StyleScorer(process.script)
    return process


def score(skill: float) -> float:
    """The mean style of a version with this skill."""
    return skill + 0.25 * (1 - skill)


def test_promise_5_an_error_in_an_evaluation_is_counted_and_is_not_a_zero(tmp_path: Path):
    run = styled(tmp_path, [1.0, 1.0])
    assert isinstance(run.workers.scorer, StyleScorer)
    run.workers.scorer.fails = True
    run.run()
    (before,) = [one for one in run.events("evaluated") if one["name"] == "test_before"]
    assert (before["score"], before["n"], before["excluded"]) == (1.0, PROMPTS - 1, 1 / PROMPTS)
    found = [one for one in run.events("evaluation_errors") if one["evaluation"] == "test_before"]
    assert found == [
        {"evaluation": "test_before", "step": 0, "name": "style", "count": 1}
        | {"first": "raised: ValueError: no style"}
    ]
    (failed, *_) = run.folder.read_rollouts(before["file"])
    assert (failed["score"], failed["errors"]) == (None, {"style": "raised: ValueError: no style"})


def interrupted(folder: Path, disk: Disk, *, metric: str) -> StubRun:
    """A run of four steps that is stopped after two; version 1 is the best of them."""
    script = Script()
    script.on["learner.update 1"] = script.stop.set
    settings = {"every_steps": 1, "metric": metric}
    run = styled(folder, SKILLS, disk=disk, script=script, eval=settings)
    assert run.run() == "interrupted"
    return run


SKILLS = [0.1, 0.9, 0.3, 0.5, 0.4]
HEAVIER = ({**STYLE, "weight": 2.0}, FORMAT)


@pytest.mark.parametrize("metric", ["style", "reward"])
def test_after_an_accepted_change_of_rewards_the_best_version_is_searched_anew(
    tmp_path: Path, metric: str
):
    disk, settings = Disk(), {"every_steps": 1, "metric": metric}
    interrupted(tmp_path, disk, metric=metric)
    again = styled(tmp_path, SKILLS, disk=disk, parts=HEAVIER, eval=settings, accept=True)
    assert again.run() == "finished"
    (changed,) = again.events(REWARDS_CHANGED)
    assert changed == {
        "after_step": 2,
        "changes": [["rewards.functions.style.weight", 1.0, 2.0]],
    }
    summary = again.summary
    # Version 1 has the better style, by rewards that are no longer those of the run.
    assert summary["best"]["step"] == 3
    assert again.script.calls[-1] == "learner.export 3"
    # The base is scored by the same rewards as the tuned policy.
    factor = 2 if metric == "reward" else 1
    assert summary["eval"]["before"]["score"] == pytest.approx(factor * score(SKILLS[0]))
    assert summary["eval"]["after"]["score"] == pytest.approx(factor * score(SKILLS[3]))
    assert again.folder.saved_config["rewards"]["functions"][0]["weight"] == 2.0
    # A rollback to a step before the change does not bring the old validations back.
    again.folder.journal("resumed", step=1)
    process = styled(tmp_path, SKILLS, disk=disk, parts=HEAVIER, eval=settings)
    assert process.coordinator.schedule.best is None
    process.folder.close()
