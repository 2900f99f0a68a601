"""What stops a run: signals, alarms, missing rewards, updates that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.progress import Progress
from pipeline.protocols import WorkerDied
from pipeline.rollout import checkpoints, workers
from pipeline.rollout.workers import TrainingStopped
from rewards.base import Outcome, RewardInput
from tests.run_process import Killed, left_behind, validated
from tests.samples import make_config, make_data
from tests.stub_workers import Disk, StubRun

# --- signals


def watched(folder: Path, **tables: Mapping[str, Any]) -> Config:
    """Four steps with a validation after every second one and a checkpoint after every third."""
    return make_config(
        folder,
        data={"validation": {"path": "validation.jsonl"}},
        eval={"every_steps": 2},
        budget={"steps": 4},
        **{"checkpoint": {"every_steps": 3}, **tables},
    )


def interrupted(config: Config, disk: Disk, on: str) -> StubRun:
    """A process that gets a signal during a call."""
    run = StubRun(config, disk=disk, data=make_data(validation=3))
    run.script.on[on] = run.script.stop.set
    return run


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        ("sampler0.generate:probe 0", 0),
        ("sampler0.generate:test 0", 0),
        ("sampler0.generate:train 1", 1),
        ("scorer.score", 0),
        ("learner.update 1", 2),
        ("sampler0.generate:validation 0", 0),
        ("learner.keep_best 0", 0),
        ("learner.save 3", 3),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_a_summary(tmp_path: Path, call: str, steps: int):
    disk: Disk = {}
    run = interrupted(watched(tmp_path), disk, call)
    assert run.run() == "interrupted"
    assert max(disk) == steps
    adapter, meta, _ = disk[steps]
    assert (meta["step"], meta["samples"]) == (steps, 4 * steps)
    assert [row["step"] for row in run.folder.metrics] == list(range(1, steps + 1))
    assert (run.summary["ended"], run.summary["steps"]) == ("interrupted", steps)
    assert run.summary["adapter_sha256"] in {adapter, None}
    assert run.tracker.summary["ended"] == "interrupted"
    after = run.script.calls[run.script.calls.index(call) + 1 :]
    assert [name for name in after if "generate" in name or "export" in name] == []
    assert ("sampler0.abort" in after) is ("generate" in call)


def test_a_signal_during_the_export_comes_too_late(tmp_path: Path):
    assert interrupted(watched(tmp_path), {}, "learner.export 4").run() == "finished"


@pytest.mark.parametrize("dies", [True, False])
def test_a_sampler_that_does_not_stop_or_dies_does_not_prevent_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
):
    monkeypatch.setattr(workers, "STOPPING_S", 0.0)
    disk: Disk = {}
    run = interrupted(watched(tmp_path), disk, "sampler0.generate:train 2")

    async def abort() -> None:
        if dies:
            raise RuntimeError("an actor's process ended unexpectedly")

    run.sampler.abort = abort  # type: ignore[method-assign]
    assert run.run() == "interrupted"
    assert max(disk) == 2


@pytest.mark.parametrize(
    ("call", "saved", "drawn"),
    [
        ("sampler0.generate:train 2", 2, 1),
        ("learner.update 1", 2, 2),
        ("sampler0.generate:validation 0", 0, 3),
    ],
)
def test_evaluations_are_done_once_also_after_a_signal(
    tmp_path: Path, call: str, saved: int, drawn: int
):
    config, disk = watched(tmp_path), Disk()
    interrupted(config, disk, call).run()
    assert max(disk) == saved
    second = StubRun(config, disk=disk, data=make_data(validation=3))
    second.run()
    assert second.script.calls.count("sampler0.generate:validation 0") == drawn
    # Those of the test split before training, too.
    assert sum("generate:test" in name for name in second.script.calls) == 1
    evaluated = [(entry["name"], entry["step"]) for entry in second.events("evaluated")]
    validations = [("validation", step) for step in (0, 2, 4)]
    assert evaluated[:-1] == [("test_before", 0), *validations]
    assert evaluated[-1][0] == "test_after"


def test_at_a_stop_signal_a_checkpoint_that_takes_too_long_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(checkpoints, "STOP_S", 0.0)
    disk: Disk = {}
    run = interrupted(watched(tmp_path), disk, "learner.update 3")
    monkeypatch.setattr(run.learner, "save", lambda _: run.scorer.score([]))  # waits at a stop
    assert run.run() == "interrupted"
    (entry,) = run.events("checkpoint_abandoned")
    assert entry == {"step": 4, "last": 3}
    told = "the checkpoint of step 4 is not complete after 0 s and is abandoned; that of step 3"
    assert told in capsys.readouterr().out


# --- alarms

RULE: dict[str, Any] = {"above": 0.4, "steps": 1}
# The entropy of the stub is another one with each adapter.
QUIET: dict[str, Any] = {"entropy_falls": {"action": "off"}}


def alarmed(folder: Path, action: str, *, disk: Disk | None = None) -> StubRun:
    """A run of 6 steps, some of which have as many groups with equal rewards as others."""
    config = make_config(
        folder,
        alarms={"all_equal": {**RULE, "action": action}, **QUIET},
        budget={"steps": 6},
        checkpoint={"every_steps": 100},
    )
    return StubRun(config, disk=disk)


def alarms(run: StubRun) -> list[int]:
    """Steps of the alarms that no resume has rolled back."""
    return [entry["step"] for entry in run.folder.valid_entries("alarm")]


@pytest.fixture
def logged(tmp_path: Path) -> StubRun:
    """A finished run with alarms."""
    run = alarmed(tmp_path / "log", "log")
    assert run.run() == "finished"
    return run


def test_an_alarm_is_journaled_shown_and_sent_to_wandb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    logged = alarmed(tmp_path, "log")
    logged.run()
    groups = [(row["groups/all_equal"], row["groups/mixed"]) for row in logged.folder.metrics]
    beyond = [equal / (equal + mixed) > 0.4 for equal, mixed in groups]
    began = [now and not before for before, now in zip([False, *beyond], beyond, strict=False)]
    expected = [step for step, is_alarm in enumerate(began, start=1) if is_alarm]
    assert len(expected) > 1
    assert alarms(logged) == expected
    assert logged.tracker.alerts == [("WARN", "alarm all_equal")] * len(expected)
    assert capsys.readouterr().out.count("alarm all_equal: step ") == len(expected)


def test_promise_5_a_part_that_is_always_none_raises_an_alarm(tmp_path: Path):
    run = StubRun(make_config(tmp_path, budget={"steps": 4}, alarms=QUIET))
    changing(run, lambda row: {**row, "format": Outcome(None)})
    assert run.run() == "finished"
    (alarm,) = run.events("alarm")
    assert (alarm["rule"], alarm["part"], alarm["step"]) == ("always_none", "format", 3)
    # It is left out of the sum: no rollout is excluded.
    assert [row["reward/excluded_share"] for row in run.folder.metrics] == [0.0] * 4


def test_a_repeated_step_sends_no_alert_again(logged: StubRun, tmp_path: Path):
    def dies() -> None:
        raise WorkerDied("learner", "its process ended unexpectedly")

    disk: Disk = {}
    dying = alarmed(tmp_path, "log", disk=disk)
    dying.script.on[f"learner.update {alarms(logged)[0]}"] = dies
    with pytest.raises(WorkerDied):
        dying.run()
    resumed = alarmed(tmp_path, "log", disk=disk)
    assert resumed.run() == "finished"
    assert len(list(resumed.folder.events("alarm"))) == len(logged.tracker.alerts) + 1
    assert dying.tracker.alerts + resumed.tracker.alerts == logged.tracker.alerts


def test_a_checkpoint_follows_the_step_of_the_alarm(logged: StubRun, tmp_path: Path):
    run = alarmed(tmp_path, "checkpoint")
    run.run()
    steps = dict.fromkeys([*alarms(logged), 6])
    assert list(dict.fromkeys(entry["step"] for entry in run.events("checkpoint"))) == list(steps)
    assert left_behind(run.folder) == left_behind(logged.folder)


def test_a_stopped_run_keeps_the_step_before_the_alarm_and_goes_on_without_the_rule(
    logged: StubRun, tmp_path: Path
):
    first, disk = alarms(logged)[0], Disk()
    for _ in range(2):  # the same command stops again
        run = alarmed(tmp_path, "stop", disk=disk)
        with pytest.raises(
            TrainingStopped, match=rf"^alarm all_equal: step {first}: .* the run stops"
        ):
            run.run()
        assert (max(disk), run.learner.version) == (first - 1, first - 1)
        assert run.tracker.alerts == [("ERROR", "alarm all_equal")]
    free = alarmed(tmp_path, "log", disk=disk)
    assert free.run() == "finished"
    assert left_behind(free.folder) == left_behind(logged.folder)


def test_an_alarm_on_the_update_stops_after_the_step_and_the_same_command_goes_on(tmp_path: Path):
    rule = {"disagreement": {"above": 0.1, "action": "stop"}, **QUIET}
    disk, config = Disk(), make_config(tmp_path, alarms=rule, budget={"steps": 3})

    def disagreeing() -> StubRun:
        run = StubRun(config, disk=disk)
        run.learner.metrics = {"mismatch_p999": 0.2}
        return run

    first = disagreeing()
    with pytest.raises(TrainingStopped, match=r"^alarm disagreement: step 1: .* the run stops"):
        first.run()
    # Learned, recorded and saved.
    assert (max(disk), [row["step"] for row in first.folder.metrics]) == (1, [1])
    resumed = disagreeing()
    assert resumed.run() == "finished"
    assert alarms(resumed) == [1]


@pytest.mark.parametrize("action", ["log", "stop"])
def test_a_kill_between_a_validation_and_its_alarm_loses_no_alarm(tmp_path: Path, action: str):
    config = make_config(
        tmp_path,
        data={"validation": {"path": "validation.jsonl"}},
        eval={"every_steps": 5},
        alarms={"validation_falls": {"action": action}, **QUIET},
        budget={"steps": 2},
    )
    disk: Disk = {}

    def worse() -> StubRun:
        """The last version answers none of 4 validation prompts, the first one all."""
        run = StubRun(config, disk=disk, data=make_data(validation=4))
        run.sampler.skill = lambda version: 0.0 if version == 2 else 1.0
        return run

    def killed(event: str, **facts: Any) -> None:
        if event == "alarm":
            raise Killed
        journal(event, **facts)

    # The last validation follows the last checkpoint, and is not repeated.
    first = worse()
    journal, first.folder.journal = first.folder.journal, killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.run()
    assert (validated(first.folder), alarms(first)) == ([0, 2], [])
    for is_second in (False, True):  # the second one repeats nothing
        resumed = worse()
        if action == "stop" and not is_second:
            with pytest.raises(TrainingStopped, match=r"^alarm validation_falls: step 2: .* stops"):
                resumed.run()
        else:
            assert resumed.run() == "finished"
        assert (resumed.resumed_from, validated(resumed.folder)) == (2, [0, 2])
        assert alarms(resumed) == [2]


# --- rewards

Row = dict[str, Outcome]


def changing(run: StubRun, change: Callable[[Row], Row], *, first: Mapping[int, int] | None = None):
    """Changes outcomes: of all rollouts, or of the first ones, by step."""
    score = run.scorer.score

    async def changed(inputs: Sequence[RewardInput]) -> list[Row]:
        scored = await score(inputs)
        step = run.coordinator.progress.step
        count = len(scored) if first is None else first.get(step, 0)
        return [change(row) for row in scored[:count]] + scored[count:]

    run.scorer.score = changed  # type: ignore[method-assign]


def broken(run: StubRun, fails: Mapping[int, int]) -> StubRun:
    """Makes the first part fail for `fails[step]` rollouts of a step, counted from 0."""
    failed = Outcome.failed("raised", "raised KeyError: 'x'")
    changing(run, lambda row: {**row, "correct": failed}, first=fails)
    return run


def test_promise_5_reward_errors_are_counted_and_excluded(tmp_path: Path):
    config = make_config(tmp_path, budget={"steps": 1}, rollout={"group_size": 4})
    run = StubRun(config)
    given: list[float | None] = [1.0, 0.0, None, 1.0, 1.0, 1.0, None, None]
    values = iter(enumerate(given, start=1))

    def outcome(_: Row) -> Row:
        number, value = next(values)
        failed = Outcome.failed("raised", f"raised {number}")
        return {"correct": failed if value is None else Outcome(value), "format": Outcome(0.0)}

    changing(run, outcome)
    run.run()
    assert [rollout.reward for rollout in run.learner.seen[0]] == given
    # Mean 2/3 and deviation sqrt(1/3) over the three that have a reward.
    high, low = 3**0.5 / 3, -2 * 3**0.5 / 3
    advantages = [rollout.advantage for rollout in run.learner.seen[0]]
    assert advantages == pytest.approx([high, low, 0, high, 0, 0, 0, 0], abs=1e-5)
    (metrics,) = run.folder.metrics
    assert metrics["reward/mean"] == pytest.approx(4 / 5)
    assert metrics["reward/excluded_share"] == 3 / 8
    assert metrics["reward_parts/correct/error_share"] == 3 / 8
    assert metrics["reward_parts/format/error_share"] == 0
    assert metrics["groups/excluded_rollouts"] == 3
    assert (metrics["groups/mixed"], metrics["groups/all_equal"]) == (1, 1)
    assert run.summary["faults"] == {"reward_errors": 3, "skipped_updates": 0, "restarts": 0}
    assert run.events("reward_errors") == [
        {"step": 1, "name": "correct", "count": 3, "causes": {"raised": 3}, "first": "raised 3"}
    ]
    assert run.summary["samples"] == 8


def test_promise_5_above_the_share_the_run_stops_with_a_checkpoint(tmp_path: Path):
    tables: dict[str, Any] = {"budget": {"steps": 6}, "checkpoint": {"every_steps": 4}}
    whole = StubRun(make_config(tmp_path / "whole", **tables))
    whole.run()
    config, disk = make_config(tmp_path, **tables), Disk()
    why = (
        r"^alarm excluded: step 3: 75\.0% of the rollouts have no reward, above "
        r"alarms\.excluded\.above = 0\.5; the run stops with a checkpoint; reward/excluded/.*: "
        r"'correct' failed 3 times, first: raised KeyError: 'x'$"
    )
    for _ in range(2):  # the same command repeats the same step
        run = broken(StubRun(config, disk=disk), {2: 3})
        with pytest.raises(TrainingStopped, match=why):
            run.run()
        assert (max(disk), run.learner.version) == (2, 2)
        assert (disk[2][0], disk[2][1]["samples"]) == (run.learner.adapter, 8)
        # The step is recorded for the user, but not counted.
        rows = run.folder.read_rollouts("step_000003") or []
        assert [row["reward"] is None for row in rows] == [True, True, True, False]
        shown = run.folder.metrics[-1]
        assert (shown["step"], shown["reward/excluded_share"]) == (3, 0.75)
    # With the fixed reward function the run equals one without errors.
    fixed = StubRun(config, disk=disk)
    assert fixed.run() == "finished"
    assert left_behind(fixed.folder) == left_behind(whole.folder)


@pytest.mark.parametrize(
    "more",
    [
        {"dynamic_sampling": "capped", "max_prompts_per_step": 4},  # all rounds of the step count
        {"ahead": "one"},  # checked before the update
    ],
)
def test_rewards_of_further_rounds_and_of_rollouts_sampled_ahead_stop_the_run(
    tmp_path: Path, more: dict[str, Any]
):
    rollout = {"group_size": 2, "prompts_per_step": 2, "max_prompt_tokens": 8}
    rollout |= {"max_new_tokens": 80, **more}
    config = make_config(
        tmp_path, rollout=rollout, learner={"importance_cap": 2.0}, budget={"steps": 4}
    )
    run = broken(StubRun(config, data=make_data(train=8)), {1: 8})
    with pytest.raises(TrainingStopped, match=r"step [23]: 100\.0% of the rollouts"):
        run.run()
    assert run.learner.version == max(run.disk) == (2 if "ahead" in more else 1)


# --- updates whose loss or gradient is not finite


def unstable(config: Config, disk: Disk, versions: Sequence[int], *, sft: int = 0) -> StubRun:
    """A process whose learner skips the updates of these versions."""
    run = StubRun(config, disk=disk, data=make_data(sft=sft))
    run.learner.skips = versions
    return run


def longer(folder: Path, **tables: Mapping[str, Any]) -> Config:
    return make_config(folder, budget={"steps": 8}, checkpoint={"every_steps": 4}, **tables)


def test_promise_5_a_skipped_update_is_counted_and_its_batch_kept(tmp_path: Path):
    run = unstable(longer(tmp_path / "whole"), {}, [1, 2, 4])
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
    assert [row.get("learner/skipped_updates", 0.0) for row in metrics] == [0, 1, 1, 0, 1, 0, 0, 0]
    assert ["learner/loss" in row for row in metrics][:3] == [True, False, False]
    assert run.summary["faults"]["skipped_updates"] == 3
    # A signal between skipped updates changes nothing.
    disk: Disk = {}
    first = unstable(longer(tmp_path), disk, [1, 2, 4])
    first.script.on["learner.update 2"] = first.script.stop.set
    first.run()
    assert disk[3][1]["skipped_in_a_row"] == 2
    resumed = unstable(longer(tmp_path), disk, [1, 2, 4])
    assert resumed.run() == "finished"
    assert left_behind(resumed.folder) == left_behind(run.folder)


def test_steps_whose_advantages_overflow_are_skipped_updates(tmp_path: Path):
    run = StubRun(make_config(tmp_path, learner={"loss": "dr_grpo"}, budget={"steps": 6}))
    signs = iter([1e308, -1e308] * 100)
    changing(run, lambda row: {**row, "correct": Outcome(next(signs))})
    run.learner.metrics = {"tokens_trained": 0.0}
    why = "step 3: 3 updates in a row were skipped, this one because rewards are so large"
    with pytest.raises(TrainingStopped, match=why):
        run.run()
    assert [entry["step"] for entry in run.events("update_skipped")] == [1, 2, 3]
    assert not any(rollout.advantage for part in run.learner.seen for rollout in part)


def test_promise_5_three_skipped_updates_in_a_row_stop_the_run_at_the_last_good_state(
    tmp_path: Path,
):
    disk: Disk = {}
    run = unstable(longer(tmp_path), disk, [0, 2, 3, 4])
    why = "step 5: 3 updates in a row were skipped, this one because its loss is nan and the norm"
    with pytest.raises(TrainingStopped, match=why):
        run.run()
    adapter, meta, _ = disk[max(disk)]
    assert (max(disk), meta["step"], meta["skipped_updates"]) == (5, 5, 4)
    # The adapter of the last update that was applied, that of version 2.
    rows = run.folder.read_rollouts("step_000004") or []
    assert {row["adapter_sha256"] for row in rows} == {adapter}
    # The same command continues with the next step; the skipped updates count until one succeeds.
    with pytest.raises(TrainingStopped, match="step 6: 4 updates in a row were skipped"):
        unstable(longer(tmp_path), disk, [5]).run()
    fine = unstable(longer(tmp_path), disk, [7])
    assert fine.run() == "finished"
    assert fine.summary["faults"]["skipped_updates"] == 6


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
    disk: Disk = {}
    run = unstable(config, disk, [0, 2, 3, 4], sft=8)
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
