"""The loop with dynamic sampling, partial rollouts, and sampling one step ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from actors.colocated_actor import ColocatedActor
from pipeline.data.order import consecutive_prompts
from pipeline.protocols import OutOfMemory
from pipeline.types import Completion, Rollout, RolloutRequest
from rewards.base import Outcome, RewardInput
from tests.real_actor import VALIDATED, RealRun, real_config
from tests.run_process import Script
from tests.samples import changed, make_data

STEPS, TRAIN, CAP = 5, 15, 7


# --- dynamic sampling


Rounds = dict[int, list[list[int]]]


def watched(
    actor: ColocatedActor, folder: Path, *, signal: set[int], **tables: Any
) -> tuple[RealRun, Rounds]:
    """A finished run with dynamic sampling, and by step the prompts of each of its rounds.

    Three groups of two per step, from at most seven prompts; the groups of the prompts in `signal`
    have signal.
    """
    rollout = {"dynamic_sampling": "capped", "max_prompts_per_step": CAP, "prompts_per_step": 3}
    script = Script(durations={"generate:train": 10.0, "update": 5.0})
    config = real_config(folder, rollout=rollout, **tables)
    run = RealRun(config, actor, data=make_data(train=TRAIN), script=script)
    rounds: Rounds = {}
    generate = run.worker.generate

    async def watch(requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        first = requests[0].name
        if first.phase == "train":
            asked = list(dict.fromkeys(request.name.prompt_id for request in requests))
            rounds.setdefault(first.step, []).append(asked)
        return await generate(requests, **how)

    async def scored(inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        return [
            {"odd": Outcome(float(one.prompt_id in signal and number % 2))}
            for number, one in enumerate(inputs)
        ]

    run.worker.generate, run.scorer.score = watch, scored  # type: ignore[method-assign]
    assert run.run() == "finished"
    run.worker.close()
    return run, rounds


def kept(run: RealRun, step: int) -> list[list[Rollout]]:
    """The rollouts trained on in a step, group by group."""
    groups = groupby(run.worker.seen[step], key=lambda one: one.completion.name.group)
    return [list(members) for _, members in groups]


def test_rounds_by_hand(tmp_path: Path, actor: ColocatedActor):
    prompts = make_data(train=TRAIN).train.prompts
    order = [
        prompt.id
        for start in range(TRAIN)
        for prompt in consecutive_prompts(prompts, seed=5, start=start, count=1, window=CAP)
    ]
    # Of the first three groups the second has signal, of the next ones the third and fourth.
    signal = {order[1], order[5], order[6]}
    run, rounds = watched(actor, tmp_path, signal=signal, budget={"steps": 1})
    # Two are missing, and 1 of 3 gives an estimated share of 1.5 / 4: six prompts would be needed,
    # but four are left.
    assert rounds[0] == [sorted(order[:3]), sorted(order[3:7])]
    trained = [group[0].completion.name.prompt_id for group in kept(run, 0)]
    assert trained == [order[1], order[5], order[6]]
    (row,) = run.folder.metrics
    assert (row["rollout/groups_replaced"], row["rollout/groups_surplus"]) == (4, 0)
    # Reward metrics cover all sampled rollouts: 3 of 14 are right.
    assert row["reward/odd"] == pytest.approx(3 / 14)
    rows = run.folder.read_rollouts("step_000001") or []
    assert [row["prompt_id"] for row in rows] == [id_ for id_ in trained for _ in range(2)]
    assert (run.summary["samples"], run.summary["rollouts"]["unused"]) == (14, 8)
    wasted = row["rollout/tokens_wasted"]
    assert run.summary["tokens_generated"] == run.summary["tokens_trained"] + wasted


def test_without_any_signal_the_first_groups_are_kept_and_a_step_without_time_has_one_round(
    tmp_path: Path, actor: ColocatedActor
):
    budget = {"time": "83s", "steps": None}
    run, rounds = watched(actor, tmp_path, signal=set(), budget=budget)
    # 20 + 5 s per step while there is time; the third starts with 33 s left, and after its first
    # round 23 are left, less than a step of 25.
    assert [[len(part) for part in own] for own in rounds.values()] == [[3, 4], [3, 4], [3]]
    assert run.script.clock.seconds == 65
    trained = [group[0].completion.name.prompt_id for group in kept(run, 0)]
    assert sorted(trained) == rounds[0][0]
    assert {rollout.advantage for rollout in run.worker.seen[0]} == {0.0}


# --- partial rollouts, of the real actor


def truncated(one: Completion) -> Completion:
    """The completion without its last token, unfinished."""
    last = one.segments[-1]
    cut = changed(one, tokens=last.tokens[:-1], logprobs=last.logprobs[:-1])
    return replace(cut, stop_reason="truncated")


def test_kept_rollouts_are_trained_on_when_the_last_of_their_group_finishes(
    tmp_path: Path, actor: ColocatedActor
):
    # Six new rollouts a step.
    rollout = {"partial": "keep", "cut_off": 0.6, "prompts_per_step": 3}
    run = RealRun(real_config(tmp_path, **VALIDATED, rollout=rollout), actor)
    assert run.run() == "finished"
    run.worker.close()
    learned = [[rollout.completion for rollout in part] for part in run.worker.seen]
    metrics = run.folder.metrics
    names = [one.name for part in learned for one in part]
    assert len(set(names)) == len(names)
    late = waiting = cut = 0
    for step, (part, row) in enumerate(zip(learned, metrics, strict=True)):
        groups = Counter(one.name.group for one in part)
        assert set(groups.values()) <= {2}
        newest = Counter[Any]()
        for one in part:
            assert one.stop_reason in {"eos", "length"}
            versions = [segment.version for segment in one.segments]
            assert versions == sorted(set(versions))
            assert one.name.step <= versions[0]
            newest[one.name.group] = max(newest[one.name.group], versions[-1])
            late += versions[0] < step
        assert set(newest.values()) <= {step}
        rows = run.folder.read_rollouts(f"step_{step + 1:06d}") or []
        assert [row["versions"] for row in rows] == [
            [segment.version for segment in one.segments] for one in part
        ]
        # What is truncated is continued in the next step.
        assert (row["rollout/continued"], row["rollout/dropped"]) == (cut, 0)
        assert row["rollout/partial"] == waiting + 6 - len(part)
        waiting, cut = int(row["rollout/partial"]), int(row["rollout/truncated"])
        assert 0 < cut <= waiting
    assert late > 2
    found = {
        key: sum(row[f"rollout/{key}"] for row in metrics) for key in ("truncated", "continued")
    }
    # Rollouts that are partial at the end are dropped; their tokens count.
    assert run.summary["rollouts"] == {**found, "dropped": waiting, "unused": 0}
    assert run.summary["samples"] == STEPS * 6 - waiting
    assert run.summary["tokens_generated"] > run.summary["tokens_trained"]


def test_a_step_without_finished_groups_has_no_trained_tokens(
    tmp_path: Path, actor: ColocatedActor
):
    rollout = {"partial": "keep", "cut_off": 0.5, "prompts_per_step": 3}
    run = RealRun(real_config(tmp_path, rollout=rollout, budget={"steps": 2}), actor)
    generate = run.worker.generate

    async def cut_off(requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        """One of each group of the first step is not finished."""
        drawn = await generate(requests, **how)
        first = requests[0].name.phase == "train" and not run.worker.seen
        return [truncated(one) if first and not one.name.sample else one for one in drawn]

    run.worker.generate = cut_off  # type: ignore[method-assign]
    assert run.run() == "finished"
    run.worker.close()
    assert (run.worker.seen[0], run.version) == ([], 2)
    first = run.folder.metrics[0]
    assert (first["learner/tokens_trained"], first["groups/mixed"]) == (0, 0)
    assert first["rollout/partial"] == 6
    assert not any(name.startswith("reward/") for name in first)
    assert run.folder.read_rollouts("step_000001") == []


# --- one step ahead

ONE_AHEAD: dict[str, Any] = {
    "rollout": {"ahead": "one"},
    "plan": {"placement": "split"},
    "budget": {"steps": 4},
}


def test_steps_are_sampled_by_the_previous_version_while_it_is_updated(
    tmp_path: Path, actor: ColocatedActor
):
    phases: dict[str, dict[str, Any]] = {
        "run": {"phases": ["sft", "grpo"]},
        "sft": {"train": {"path": "s.jsonl"}, "steps": 1, "sequences_per_step": 2},
    }
    run = RealRun(real_config(tmp_path, **ONE_AHEAD, **phases), actor)
    assert run.run() == "finished"
    run.worker.close()
    calls = run.script.calls
    for step in range(1, 4):
        rows = run.folder.read_rollouts(f"step_{step + 1:06d}") or []
        ((version,),) = {tuple(row["versions"]) for row in rows}
        assert version == max(step - 1, 1)  # the first one has none before it
        assert run.folder.metrics[step]["rollout/staleness_max"] == step - version
        assert (calls.index(f"generate:train {step}") < calls.index(f"load {step}")) is (step > 1)


@pytest.mark.parametrize("call", ["update 1", "generate:train 2"])
def test_an_error_on_either_side_ends_the_run(tmp_path: Path, actor: ColocatedActor, call: str):
    run = RealRun(real_config(tmp_path, **ONE_AHEAD), actor)

    def breaks() -> None:
        raise OutOfMemory("update", "no room")

    run.script.on[call] = breaks
    with pytest.raises(OutOfMemory):
        run.run()
    run.worker.close()
    # Where the sampling fails the update has succeeded, but its step is not counted.
    assert [row["step"] for row in run.folder.metrics] == [1]
