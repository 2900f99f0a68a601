"""Sampling one step ahead: concurrency, versions, and interrupted runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.protocols import OutOfMemory
from pipeline.types import Completion, Rollout, RolloutRequest
from tests.fakes import Disk, Process, Script, left_behind
from tests.resumes import check_same_run
from tests.samples import FRESH, make_config, make_data

STEPS = 4


def config_of(folder: Path, **tables: Any) -> Config:
    rollout = {"ahead": "one", **tables.pop("rollout", {})}
    return make_config(
        folder,
        **{
            "rollout": rollout,
            "learner": {"importance_cap": 2.0},
            "budget": {"steps": STEPS},
            "data": {"validation": {"path": "validation.jsonl"}},
            "eval": {"every_steps": 2},
            "checkpoint": {"every_steps": 3},
            **tables,
        },
    )


def process(config: Config, disk: Disk, script: Script | None = None) -> Process:
    return Process(config, disk=disk, script=script, data=make_data(validation=3, sft=6))


def finished(config: Config, disk: Disk | None = None, script: Script | None = None) -> Process:
    run = process(config, Disk() if disk is None else disk, script)
    assert run.run() == "finished"
    return run


def test_the_next_step_is_sampled_during_the_update(tmp_path: Path):
    run = Process(make_config(tmp_path, **AHEAD), disk=Disk())
    run.run()
    calls = run.script.calls
    assert calls[calls.index("sampler0.generate:train 0") : calls.index("learner.export 3")] == [
        "sampler0.generate:train 0",
        "scorer.score",
        "learner.update 0",
        "sampler0.generate:train 1",
        "scorer.score",
        "learner.publish 1",
        "sampler0.load 1",
        "learner.update 1",
        "sampler0.generate:train 2",
        "scorer.score",
        "learner.publish 2",
        "sampler0.load 2",
        "learner.save 2",
        "learner.update 2",
        "learner.publish 3",
        "sampler0.load 3",
        "learner.save 3",
        "sampler0.generate:test 0",
    ]


AHEAD: dict[str, Any] = {"rollout": {"ahead": "one"}, "learner": {"importance_cap": 2.0}}


def test_update_and_sampling_run_concurrently(tmp_path: Path):
    """An update that waits for the next step's sampling to start finishes."""
    run = process(config_of(tmp_path), Disk())
    began = {step: asyncio.Event() for step in range(STEPS)}
    generate, update = run.samplers[0].generate, run.learner.update

    async def watched(requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        if requests[0].name.phase == "train":
            began[requests[0].name.step].set()
        return await generate(requests, **how)

    async def slow(rollouts: Sequence[Rollout], **how: Any) -> dict[str, float]:
        following = run.learner.version + 1
        if following < STEPS:
            await asyncio.wait_for(began[following].wait(), 10)
        return await update(rollouts, **how)

    run.samplers[0].generate = watched  # type: ignore[method-assign]
    run.learner.update = slow  # type: ignore[method-assign]
    assert run.run() == "finished"


@pytest.mark.parametrize("warm", [0, 2])
def test_every_step_but_the_first_is_sampled_by_the_previous_version(tmp_path: Path, warm: int):
    phases: dict[str, dict[str, Any]] = {
        "run": {"phases": ["sft", "grpo"]},
        "sft": {"train": {"path": "s.jsonl"}},
    }
    phases["sft"]["steps"] = warm
    run = finished(config_of(tmp_path, **(phases if warm else {})))
    hashes: dict[int, str] = {}
    for step in range(warm, STEPS):
        rows = run.folder.read_rollouts(f"step_{step + 1:06d}") or []
        ((version,),) = {tuple(row["versions"]) for row in rows}
        assert version == max(step - 1, warm)
        (sha,) = {row["adapter_sha256"] for row in rows}
        assert hashes.setdefault(version, sha) == sha
        metrics = run.folder.metrics[step]
        assert metrics["rollout/staleness_mean"] == step - version
        assert metrics["rollout/staleness_max"] == step - version
    assert len(set(hashes.values())) == len(hashes) == STEPS - warm - 1
    assert (hashes[warm] == FRESH) == (warm == 0)


def test_sampling_ahead_is_timed_separately(tmp_path: Path):
    durations = {"sampler0.generate:train": 5.0, "scorer.score": 1.0, "learner.update": 3.0}
    run = finished(config_of(tmp_path), script=Script(durations=durations))
    rows = run.folder.metrics
    first, second, *_, last = rows
    # The fakes share a clock: while one samples ahead, the seconds of both are counted.
    assert (first["time/sample_s"] + first["time/learn_s"], first["time/reward_s"]) == (14.0, 1.0)
    assert "time/reward_s" not in second
    for row in rows:
        assert row["time/ahead_s"] == 6.0
    assert second["time/learn_s"] + second["time/sample_s"] == 9.0
    assert last["time/learn_s"] + last["time/sample_s"] == 3.0


def test_partial_rollouts_are_continued_while_sampling_ahead(tmp_path: Path):
    rollout = {"ahead": "one", "partial": "keep", "cut_off": 0.6, "prompts_per_step": 3}
    run = finished(config_of(tmp_path, rollout=rollout, budget={"steps": 6}))
    versions = [
        (step, row["versions"])
        for step in range(6)
        for row in run.folder.read_rollouts(f"step_{step + 1:06d}") or []
    ]
    assert any(len(drawn) > 1 for _, drawn in versions)
    for step, drawn in versions:
        assert max(drawn) <= max(step - 1, 0)
    assert max(row["rollout/staleness_max"] for row in run.folder.metrics[1:]) > 1


def test_rollouts_left_over_at_the_deadline_are_counted_as_dropped(tmp_path: Path):
    durations = {"sampler0.generate:train": 10.0, "learner.update": 10.0, "learner.save": 10.0}
    config = config_of(tmp_path, budget={"time": "100s", "steps": None}, data={}, eval={})
    run = finished(config, script=Script(durations=durations))
    summary = run.folder.summary
    assert summary is not None
    steps = summary["steps"]
    drawn = run.script.calls.count(f"sampler0.generate:train {steps}")
    assert drawn == 1
    assert summary["rollouts"]["dropped"] == 4
    assert summary["samples"] == 4 * steps
    assert summary["tokens_generated"] > summary["tokens_trained"]


# --- interrupted runs


def interrupted(config: Config, disk: Disk, on: str | int) -> Process:
    script = Script()
    script.on[on] = script.stop.set
    run = process(config, disk, script)
    assert run.run() == "interrupted"
    return run


@pytest.mark.parametrize("call", ["learner.update 1", "sampler0.generate:train 2"])
def test_a_signal_abandons_the_sampling_but_not_the_update(tmp_path: Path, call: str):
    disk = Disk()
    run = interrupted(config_of(tmp_path), disk, call)
    assert max(disk) == 2
    assert [row["step"] for row in run.folder.metrics] == [1, 2]
    assert run.folder.summary is not None
    assert run.folder.summary["adapter_sha256"] == disk[2][0]
    assert run.folder.summary["rollouts"]["dropped"] == 0
    aborted = "sampler0.abort" in run.script.calls
    assert aborted == (call != "learner.update 1")
    # An aborted sampler may be gone: it gets no more calls.
    assert ("sampler0.load 2" in run.script.calls) == (not aborted)


def test_a_signal_during_repeated_sampling_keeps_the_checkpoint(tmp_path: Path):
    config, disk = config_of(tmp_path), Disk()
    interrupted(config, disk, "learner.update 1")
    second = interrupted(config, disk, "sampler0.generate:train 2")
    assert max(disk) == 2
    assert second.folder.summary is not None
    assert second.folder.summary["adapter_sha256"] == disk[2][0]


@pytest.mark.slow
@pytest.mark.parametrize(("partial", "hard"), [("off", True), ("off", False), ("keep", True)])
def test_promise_3_a_run_ended_at_any_call_is_the_same_run(
    tmp_path: Path, partial: str, *, hard: bool
):
    cut = {"partial": "keep", "cut_off": 0.6, "prompts_per_step": 3}

    rollout = cut if partial == "keep" else {}
    check_same_run(
        lambda folder, disk, script: process(config_of(folder, rollout=rollout), disk, script),
        tmp_path,
        hard=hard,
    )


def test_a_resumed_run_samples_again_under_the_previous_version(tmp_path: Path):
    config, disk = config_of(tmp_path), Disk()
    interrupted(config, disk, "learner.update 1")
    second = finished(config, disk)
    calls = second.script.calls
    again = calls.index("sampler0.generate:train 2")
    assert calls[again - 2 : again + 4] == [
        "learner.publish 1",
        "sampler0.load 1",
        "sampler0.generate:train 2",
        "scorer.score",
        "learner.publish 2",
        "sampler0.load 2",
    ]


def test_an_extended_run_equals_a_longer_run(tmp_path: Path):
    whole = finished(config_of(tmp_path / "whole", eval={"every_steps": 1}))
    config, disk = config_of(tmp_path / "two", eval={"every_steps": 1}, budget={"steps": 2}), Disk()
    finished(config, disk)
    second = process(config, disk)
    second.deadline.steps = STEPS
    assert second.run() == "finished"
    assert second.learner.adapter == whole.learner.adapter
    assert left_behind(second.folder)["metrics"] == left_behind(whole.folder)["metrics"]


class BrokenError(Exception):
    """An error of a worker."""


def break_at(run: Process, side: str, error: Exception) -> None:
    """Makes the update of step 1 fail, or the sampling during it."""
    update, generate = run.learner.update, run.samplers[0].generate

    async def bad_update(rollouts: Sequence[Rollout], **how: Any) -> dict[str, float]:
        if run.learner.version == 1:
            await asyncio.sleep(0)
            raise error
        return await update(rollouts, **how)

    async def bad_generate(requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        if (requests[0].name.phase, requests[0].name.step) == ("train", 2):
            raise error
        return await generate(requests, **how)

    if side == "learner":
        run.learner.update = bad_update  # type: ignore[method-assign]
    else:
        run.samplers[0].generate = bad_generate  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("side", "error"),
    [
        ("learner", BrokenError()),
        ("sampler", BrokenError()),
        ("learner", OutOfMemory("update", "no room")),
        # The update succeeds, but its step is not counted, so no checkpoint may contain it.
        ("sampler", OutOfMemory("generate", "no room")),
    ],
)
def test_an_error_on_either_side_ends_the_run_and_a_resumed_run_is_the_same(
    tmp_path: Path, side: str, error: Exception
):
    expected = left_behind(finished(config_of(tmp_path / "whole")).folder)
    config, disk = config_of(tmp_path / "broken"), Disk()
    run = process(config, disk)
    break_at(run, side, error)
    pending: list[asyncio.Task[Any]] = []

    async def until_it_breaks() -> None:
        with pytest.raises((BrokenError, OutOfMemory)):
            await run.coordinator.run()
        await asyncio.sleep(0)
        pending.extend(asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(until_it_breaks())
    run.folder.close()
    assert pending == []
    assert [row["step"] for row in run.folder.metrics] == [1]
    assert left_behind(finished(config, disk).folder) == expected
