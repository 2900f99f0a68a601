"""Conditions that stop a run: missing rewards, and updates that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.data.packed_batch import PackedRow
from pipeline.progress import Progress
from pipeline.rollout.workers import TrainingStopped
from pipeline.run.run_folder import RunFolder
from pipeline.types import Rollout
from rewards.base import Outcome, RewardInput
from tests.fakes import Disk, Process, Script, left_behind
from tests.samples import make_config, make_data

STEPS = {"budget": {"steps": 6}, "checkpoint": {"every_steps": 4}}


def broken(process: Process, fails: Mapping[int, int]) -> Process:
    """Makes the first part fail for `fails[step]` rollouts of a step, counted from 0."""
    score = process.scorer.score

    async def failing(inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        scored = await score(inputs)
        for row in scored[: fails.get(process.coordinator.progress.step, 0)]:
            row["correct"] = Outcome.failed("raised", "raised KeyError: 'x'")
        return scored

    process.scorer.score = failing  # type: ignore[method-assign]
    return process


# --- too many rollouts without a reward


def test_promise_5_above_the_share_the_run_stops_with_a_checkpoint(tmp_path: Path):
    config, disk = make_config(tmp_path, **STEPS), Disk()
    run = broken(Process(config, disk=disk), {0: 1, 1: 2, 2: 3})
    why = (
        r"^alarm excluded: step 3: 75\.0% of the rollouts have no reward, above "
        r"alarms\.excluded\.above = 0\.5; the run stops with a checkpoint; reward/excluded/.*: "
        r"'correct' failed 3 times, first: raised KeyError: 'x'$"
    )
    with pytest.raises(TrainingStopped, match=why):
        run.run()
    assert run.learner.version == 2
    assert (max(disk), disk[2][1]["step"], disk[2][1]["reward_errors"]) == (2, 2, 3)
    assert disk[2][0] == run.learner.adapter
    # The step is recorded for the user, but not counted.
    rows = run.folder.read_rollouts("step_000003") or []
    assert [row["reward"] is None for row in rows] == [True, True, True, False]
    shown = run.folder.metrics[-1]
    assert (shown["step"], shown["reward/excluded_share"]) == (3, 0.75)
    assert run.events("reward_errors")[-1]["count"] == 3
    assert disk[2][1]["samples"] == 8


def test_promise_3_a_stopped_run_repeats_the_same_step(tmp_path: Path):
    whole = Process(make_config(tmp_path / "whole", **STEPS), disk=Disk())
    whole.run()
    config, disk = make_config(tmp_path, **STEPS), Disk()
    for _ in range(2):
        run = broken(Process(config, disk=disk), {2: 4})
        with pytest.raises(TrainingStopped, match=r"step 3: 100\.0% of the rollouts"):
            run.run()
        assert (max(disk), run.learner.version) == (2, 2)
    # With the fixed reward function the run equals one without errors.
    fixed = Process(config, disk=disk)
    assert fixed.run() == "finished"
    assert left_behind(fixed.folder) == left_behind(whole.folder)


@pytest.mark.parametrize(("most", "stops"), [(0.0, True), (0.25, False), (1.0, False)])
def test_a_resume_may_change_the_allowed_share(tmp_path: Path, most: float, stops: bool):
    alarms = {"excluded": {"above": most}}
    config = make_config(tmp_path, alarms=alarms, budget={"steps": 1})
    run = broken(Process(config, disk=Disk()), {0: 4 if most == 1 else 1})
    if stops:
        with pytest.raises(TrainingStopped, match=r"step 1: 25\.0% of the rollouts"):
            run.run()
    else:
        assert run.run() == "finished"
    RunFolder.of(config).check(make_config(tmp_path, alarms={"excluded": {"action": "log"}}))


def test_a_part_of_weight_0_never_stops_a_run(tmp_path: Path):
    functions = [
        {"name": "correct", "function": "rewards.correctness:exact_answer", "weight": 0.0},
        {"name": "format", "function": "rewards.format:well_formed"},
    ]
    config = make_config(tmp_path, rewards={"functions": functions}, budget={"steps": 1})
    run = broken(Process(config, disk=Disk()), {0: 4})
    assert run.run() == "finished"
    (metrics,) = run.folder.metrics
    assert (metrics["reward/excluded_share"], metrics["reward/errors"]) == (0.0, 4.0)
    assert run.folder.summary is not None
    assert run.folder.summary["faults"]["reward_errors"] == 4


def test_all_rounds_of_a_step_count(tmp_path: Path):
    rollout = {"dynamic_sampling": "capped", "max_prompts_per_step": 4}
    rollout |= {"group_size": 2, "prompts_per_step": 2}
    rollout |= {"max_prompt_tokens": 8, "max_new_tokens": 80}
    config = make_config(tmp_path, budget={"steps": 2}, rollout=rollout)
    run = broken(Process(config, disk=Disk(), data=make_data(train=8)), {0: 4})
    with pytest.raises(TrainingStopped, match=r"step 1: 100\.0% of the rollouts"):
        run.run()
    assert len(run.folder.read_rollouts("step_000001") or []) == 8


def test_rollouts_sampled_ahead_are_checked_before_the_update(tmp_path: Path):
    rollout = {"ahead": "one", "group_size": 2, "prompts_per_step": 2}
    rollout |= {"max_prompt_tokens": 8, "max_new_tokens": 80}
    config = make_config(
        tmp_path, rollout=rollout, learner={"importance_cap": 2.0}, budget={"steps": 4}
    )
    disk = Disk()
    for _ in range(2):
        run = Process(config, disk=disk)
        score = run.scorer.score

        async def failing(
            inputs: Sequence[RewardInput], score: Any = score, run: Process = run
        ) -> list[dict[str, Outcome]]:
            scored = await score(inputs)
            drawn = {call for call in run.script.calls if "generate:train 2" in call}
            lost = Outcome.failed("not_finite", "returned nan")
            return [{**row, "correct": lost} for row in scored] if drawn else scored

        run.scorer.score = failing  # type: ignore[method-assign]
        with pytest.raises(TrainingStopped, match=r"step 3: 100\.0% of the rollouts"):
            run.run()
        assert (max(disk), run.learner.version) == (2, 2)


# --- updates whose loss or gradient is not finite


def unstable(process: Process, versions: Sequence[int]) -> Process:
    """Makes the learner skip the updates of these versions, as the real one does."""
    learner = process.learner
    update, sft_update = learner.update, learner.sft_update
    skipped = {"skipped_updates": 1.0, "loss": math.nan, "grad_norm": math.nan}
    skipped |= {"tokens_trained": 0.0}

    async def updating(rollouts: Sequence[Rollout], **scalars: float | None) -> dict[str, float]:
        version, adapter = learner.version, learner.adapter
        metrics = await update(rollouts, **scalars)
        if version in versions:
            learner.adapter = adapter
            return metrics | skipped
        return metrics

    async def imitating(sequences: Sequence[PackedRow]) -> dict[str, float]:
        version, adapter = learner.version, learner.adapter
        metrics = await sft_update(sequences)
        if version in versions:
            learner.adapter = adapter
            return metrics | skipped
        return metrics

    learner.update = updating  # type: ignore[method-assign]
    learner.sft_update = imitating  # type: ignore[method-assign]
    return process


def longer(folder: Path, **tables: Mapping[str, Any]) -> Config:
    return make_config(
        folder, **{"budget": {"steps": 8}, "checkpoint": {"every_steps": 4}, **tables}
    )


def test_a_skipped_update_is_counted_and_its_batch_kept(tmp_path: Path):
    run = unstable(Process(longer(tmp_path), disk=Disk()), [1, 2, 4])
    assert run.run() == "finished"
    events = run.events("update_skipped")
    why = "its loss is nan and the norm of its gradient nan"
    assert [(event["step"], event["why"], event["batch"]) for event in events] == [
        (step, why, f"rollouts/step_{step:06d}.jsonl") for step in (2, 3, 5)
    ]
    for step in range(1, 9):
        rows = run.folder.read_rollouts(f"step_{step:06d}") or []
        kept = step in (2, 3, 5)
        assert [{"tokens", "logprobs"} <= row.keys() for row in rows] == [kept] * 4
    metrics = run.folder.metrics
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert [row.get("learner/skipped_updates", 0.0) for row in metrics] == [0, 1, 1, 0, 1, 0, 0, 0]
    assert ["learner/loss" in row for row in metrics][:3] == [True, False, False]
    assert run.folder.summary is not None
    assert run.folder.summary["faults"]["skipped_updates"] == 3


def test_steps_whose_advantages_overflow_are_skipped_updates(tmp_path: Path):
    tables: dict[str, Any] = {**STEPS, "learner": {"loss": "dr_grpo"}}
    run = Process(make_config(tmp_path, **tables), disk=Disk())
    score = run.scorer.score

    async def huge(inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        scored = await score(inputs)
        for number, row in enumerate(scored):
            row["correct"] = Outcome(1e308 if number % 2 else -1e308)
        return scored

    update = run.learner.update

    async def nothing(rollouts: Sequence[Rollout], **scalars: float | None) -> dict[str, float]:
        assert not any(rollout.advantage for rollout in rollouts)
        return {**await update(rollouts, **scalars), "tokens_trained": 0.0}

    run.scorer.score = huge  # type: ignore[method-assign]
    run.learner.update = nothing  # type: ignore[method-assign]
    why = "step 3: 3 updates in a row were skipped, this one because rewards are so large"
    with pytest.raises(TrainingStopped, match=why):
        run.run()
    assert [entry["step"] for entry in run.events("update_skipped")] == [1, 2, 3]


def test_three_skipped_updates_in_a_row_stop_the_run_at_the_last_good_state(tmp_path: Path):
    disk = Disk()
    run = unstable(Process(longer(tmp_path), disk=disk), [0, 2, 3, 4])
    why = "step 5: 3 updates in a row were skipped, this one because its loss is nan and the norm"
    with pytest.raises(TrainingStopped, match=why):
        run.run()
    adapter, meta = disk[max(disk)]
    assert (max(disk), meta["step"], meta["skipped_updates"]) == (5, 5, 4)
    # The adapter of the last update that was applied, that of version 2.
    rows = run.folder.read_rollouts("step_000004") or []
    assert {row["adapter_sha256"] for row in rows} == {adapter}
    # The same command continues with the next step; the skipped updates count until one succeeds.
    again = unstable(Process(longer(tmp_path), disk=disk), [5])
    with pytest.raises(TrainingStopped, match="step 6: 4 updates in a row were skipped"):
        again.run()
    fine = unstable(Process(longer(tmp_path), disk=disk), [7])
    assert fine.run() == "finished"
    assert fine.folder.summary is not None
    assert fine.folder.summary["faults"]["skipped_updates"] == 6


def test_promise_3_a_signal_between_skipped_updates_changes_nothing(tmp_path: Path):
    whole = unstable(Process(longer(tmp_path / "whole"), disk=Disk()), [1, 2, 4])
    whole.run()
    disk, script = Disk(), Script()
    script.on["learner.update 2"] = script.stop.set
    unstable(Process(longer(tmp_path), disk=disk, script=script), [1, 2, 4]).run()
    assert disk[3][1]["skipped_in_a_row"] == 2
    resumed = unstable(Process(longer(tmp_path), disk=disk), [1, 2, 4])
    assert resumed.run() == "finished"
    assert left_behind(resumed.folder) == left_behind(whole.folder)


def test_a_step_without_an_update_does_not_change_the_count_of_skipped_updates():
    nothing = {"tokens_trained": 0.0, "tokens_padded": 2.0}
    skipped = nothing | {"skipped_updates": 1.0}
    progress, rows = Progress(), []
    trained = {"tokens_trained": 5.0}
    for learned in (skipped, nothing, skipped, skipped | trained, nothing | trained):
        progress = progress.after_update(learned)
        rows.append((progress.skipped_in_a_row, progress.skipped_updates))
    assert rows == [(1, 1), (1, 1), (2, 2), (1, 3), (0, 3)]
    assert (progress.tokens_trained, progress.tokens_padded, progress.step) == (10, 10, 0)


def test_the_sft_phase_skips_and_stops_in_the_same_way(tmp_path: Path):
    config = longer(
        tmp_path,
        run={"name": "run", "phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 6, "sequences_per_step": 2},
    )
    disk = Disk()
    run = unstable(Process(config, disk=disk, data=make_data(sft=8)), [0, 2, 3, 4])
    with pytest.raises(TrainingStopped, match="step 5: 3 updates in a row were skipped"):
        run.run()
    assert (max(disk), disk[5][1]["skipped_updates"]) == (5, 4)
    assert [event["batch"] for event in run.events("update_skipped")] == [
        f"rollouts/sft_{step:06d}.jsonl" for step in (1, 3, 4, 5)
    ]
    rows = run.folder.read_rollouts("sft_000001") or []
    assert {row["sequence"] for row in rows} == {0, 1}
    assert all(row["tokens"][-1] == 1 for row in rows)
    assert "sft/loss" not in run.folder.metrics[0]
