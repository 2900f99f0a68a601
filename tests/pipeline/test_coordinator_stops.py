"""What stops a run: signals, alarms, missing rewards, updates that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.colocated_actor import ColocatedActor
from configs.alarms import THRESHOLDS, Threshold
from pipeline.progress import Progress
from pipeline.rollout.workers import TrainingStopped
from rewards.base import Outcome, RewardInput
from tests.real_actor import VALIDATED, RealRun, real_config
from tests.run_process import left_behind

QUIET: dict[str, Any] = {"off": ["all_equal"]}
EVERY_THIRD: dict[str, Any] = {"checkpoint": {"every_steps": 3}, "budget": {"steps": 4}}


def process(actor: ColocatedActor, folder: Path, **tables: Mapping[str, Any]) -> RealRun:
    return RealRun(real_config(folder, **{"alarms": QUIET, **tables}), actor)


def ended(run: RealRun) -> str:
    """How the process ends; raises what ends it."""
    try:
        return run.run()
    finally:
        run.worker.close()


def saved(run: RealRun) -> int:
    """Step of the newest checkpoint."""
    return int(list(run.folder.events("checkpoint"))[-1]["step"])


# --- signals


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        ("generate:test 0", 0),
        ("generate:train 1", 1),
        ("scorer.score", 0),
        ("update 1", 2),
        ("save 3", 3),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_a_summary(
    actor: ColocatedActor, tmp_path: Path, call: str, steps: int
):
    run = process(actor, tmp_path, **VALIDATED, **EVERY_THIRD)
    run.script.on[call] = run.script.stop.set
    assert ended(run) == "interrupted"
    again = process(actor, tmp_path, **VALIDATED, **EVERY_THIRD)
    assert (again.resumed_from, again.progress.samples) == (steps, 4 * steps)
    again.folder.close()
    assert [row["step"] for row in run.folder.metrics] == list(range(1, steps + 1))
    assert run.tracker.summary["ended"] == "interrupted"
    assert run.tracker.summary["steps"] == steps
    after = run.script.calls[run.script.calls.index(call) + 1 :]
    assert [name for name in after if "generate" in name or "export" in name] == []


def test_evaluations_are_done_once_also_after_a_signal(actor: ColocatedActor, tmp_path: Path):
    first = process(actor, tmp_path, **VALIDATED, **EVERY_THIRD)
    first.script.on["generate:train 2"] = first.script.stop.set
    assert ended(first) == "interrupted"
    second = process(actor, tmp_path, **VALIDATED, **EVERY_THIRD)
    assert ended(second) == "finished"
    calls = first.script.calls + second.script.calls
    assert calls.count("generate:validation 0") == 3
    assert sum("generate:test" in name for name in calls) == 2
    evaluated = [(entry["name"], entry["step"]) for entry in second.events("evaluated")]
    steps = [("validation", step) for step in (0, 2, 4)]
    assert evaluated[:-1] == [("test_before", 0), *steps]


# --- alarms


@pytest.fixture(scope="module", autouse=True)
def few_groups_may_be_equal() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(THRESHOLDS, "all_equal", Threshold("above", 0.4, 1))
        yield


def alarmed(actor: ColocatedActor, folder: Path, **rules: list[str]) -> RealRun:
    """A run of 6 steps, some of which have as many groups with equal rewards as others."""
    tables: dict[str, Any] = {"budget": {"steps": 6}, "checkpoint": {"every_steps": 100}}
    return process(actor, folder, alarms=rules, **tables)


def alarms(run: RealRun) -> list[int]:
    """Steps of the alarms that no resume has rolled back."""
    return [entry["step"] for entry in run.folder.valid_entries("alarm")]


@pytest.fixture(scope="module")
def logged(actor: ColocatedActor, tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """A finished run with alarms."""
    run = alarmed(actor, tmp_path_factory.mktemp("log"))
    assert ended(run) == "finished"
    return run


def test_an_alarm_is_journaled_and_sent_to_wandb(logged: RealRun):
    groups = [(row["groups/all_equal"], row["groups/mixed"]) for row in logged.folder.metrics]
    beyond = [equal / (equal + mixed) > 0.4 for equal, mixed in groups]
    began = [now and not before for before, now in zip([False, *beyond], beyond, strict=False)]
    expected = [step for step, is_alarm in enumerate(began, start=1) if is_alarm]
    assert len(expected) > 1
    assert alarms(logged) == expected
    assert logged.tracker.alerts == [("WARN", "alarm all_equal")] * len(expected)
    shown = logged.records.console.status.last_alarm
    assert shown is not None
    assert (shown["step"], shown["rule"]) == (expected[-1], "all_equal")


def test_a_stopped_run_keeps_the_step_before_the_alarm_and_goes_on_without_the_rule(
    logged: RealRun, actor: ColocatedActor, tmp_path: Path
):
    first = alarms(logged)[0]
    for _ in range(2):  # the same command stops again
        run = alarmed(actor, tmp_path, stop=["all_equal"])
        with pytest.raises(
            TrainingStopped, match=rf"^alarm all_equal: step {first}: .* the run stops"
        ):
            ended(run)
        assert saved(run) == run.version == first - 1
        assert run.tracker.alerts == [("ERROR", "alarm all_equal")]
    free = alarmed(actor, tmp_path)
    assert ended(free) == "finished"
    assert left_behind(free.folder) == left_behind(logged.folder)


def test_an_alarm_on_the_update_stops_after_the_step_and_the_same_command_goes_on(
    actor: ColocatedActor, tmp_path: Path
):
    rule = {"stop": ["disagreement"], **QUIET}
    for number in range(2):
        run = process(actor, tmp_path, alarms=rule, budget={"steps": 3})
        run.worker.metrics = {"mismatch_p999": 0.2}
        if number:
            assert ended(run) == "finished"
        else:
            with pytest.raises(TrainingStopped, match=r"^alarm disagreement: step 1: .* the run s"):
                ended(run)
            # Learned, recorded and saved.
            assert (saved(run), [row["step"] for row in run.folder.metrics]) == (1, [1])
        assert alarms(run) == [1]


# --- rewards

Row = dict[str, Outcome]


def changing(run: RealRun, change: Callable[[Row], Row], *, first: Mapping[int, int] | None = None):
    """Changes outcomes: of all rollouts, or of the first ones, by step."""
    score = run.scorer.score

    async def changed(inputs: Sequence[RewardInput]) -> list[Row]:
        scored = await score(inputs)
        step = run.coordinator.progress.step
        count = len(scored) if first is None else first.get(step, 0)
        return [change(row) for row in scored[:count]] + scored[count:]

    run.scorer.score = changed  # type: ignore[method-assign]


FAILED = Outcome.failed("raised", "raised KeyError: 'x'")


def test_promise_5_reward_errors_are_counted_and_excluded(actor: ColocatedActor, tmp_path: Path):
    run = process(actor, tmp_path, budget={"steps": 1}, rollout={"group_size": 4})
    given: list[float | None] = [1.0, 0.0, None, 1.0, 1.0, 1.0, None, None]
    values = iter(given)

    def outcome(_: Row) -> Row:
        value = next(values)
        return {"odd": FAILED if value is None else Outcome(value)}

    changing(run, outcome, first={0: 8})
    assert ended(run) == "finished"
    assert [rollout.reward for rollout in run.worker.seen[0]] == given
    # Mean 2/3 and deviation sqrt(1/3) over the three that have a reward.
    high, low = 3**0.5 / 3, -2 * 3**0.5 / 3
    advantages = [rollout.advantage for rollout in run.worker.seen[0]]
    assert advantages == pytest.approx([high, low, 0, high, 0, 0, 0, 0], abs=1e-5)
    (metrics,) = run.folder.metrics
    assert metrics["reward/mean"] == pytest.approx(4 / 5)
    assert metrics["reward/excluded_share"] == metrics["reward_parts/odd/error_share"] == 3 / 8
    assert (metrics["groups/mixed"], metrics["groups/all_equal"]) == (1, 1)
    assert run.summary["faults"] == {"reward_errors": 3, "skipped_updates": 0, "restarts": 0}
    error = {"count": 3, "causes": {"raised": 3}, "first": "raised KeyError: 'x'"}
    assert run.events("reward_errors") == [{"step": 1, "name": "odd", **error}]
    assert run.summary["samples"] == 8


def test_promise_5_above_the_share_the_run_stops_with_a_checkpoint(
    actor: ColocatedActor, tmp_path: Path
):
    tables: dict[str, Any] = {"budget": {"steps": 4}, "checkpoint": {"every_steps": 4}}
    why = (
        r"^alarm excluded: step 3: 75\.0% of the rollouts have no reward, above "
        r"0\.5; the run stops with a checkpoint \(alarms\.stop\); reward/excluded/"
    )
    for _ in range(2):  # the same command repeats the same step
        run = process(actor, tmp_path, **tables)
        changing(run, lambda _: {"odd": FAILED}, first={2: 3})
        with pytest.raises(TrainingStopped, match=why):
            ended(run)
        assert saved(run) == run.version == 2
        # The step is recorded for the user, but not counted.
        rows = run.folder.read_rollouts("step_000003") or []
        assert [row["reward"] is None for row in rows] == [True, True, True, False]
        shown = run.folder.metrics[-1]
        assert (shown["step"], shown["reward/excluded_share"]) == (3, 0.75)
    fixed = process(actor, tmp_path, **tables)
    assert fixed.progress.samples == 8
    assert ended(fixed) == "finished"
    assert (fixed.summary["samples"], fixed.summary["faults"]["reward_errors"]) == (16, 0)


# --- updates whose loss or gradient is not finite


def unstable(actor: ColocatedActor, folder: Path, versions: Sequence[int]) -> RealRun:
    """A process whose learner skips the updates of these versions."""
    run = process(actor, folder, budget={"steps": 8}, checkpoint={"every_steps": 4})
    values = iter([1.0, 0.0] * 1000)
    changing(run, lambda _: {"odd": Outcome(next(values))})  # every group has a signal
    run.worker.skips = versions
    return run


def test_promise_5_skipped_updates_are_counted_and_three_in_a_row_stop_the_run(
    actor: ColocatedActor, tmp_path: Path
):
    run = unstable(actor, tmp_path, [0, 2, 3, 4])
    why = "its loss is nan and the norm of its gradient nan"
    with pytest.raises(TrainingStopped, match=f"step 5: 3 updates .* this one because {why}"):
        ended(run)
    # The batches of the skipped updates are kept with what the learner was given.
    events, skipped = run.events("update_skipped"), (1, 3, 4, 5)
    assert [(event["step"], event["batch"], event["why"]) for event in events] == [
        (step, f"rollouts/step_{step:06d}.jsonl", why) for step in skipped
    ]
    hashes = []
    for step, metrics in enumerate(run.folder.metrics, start=1):
        rows = run.folder.read_rollouts(f"step_{step:06d}") or []
        assert [{"tokens", "logprobs"} <= row.keys() for row in rows] == [step in skipped] * 4
        assert (metrics.get("learner/skipped_updates", 0.0) == 1) is (step in skipped)
        assert ("learner/loss" in metrics) is (step not in skipped)
        hashes.append(rows[0]["adapter_sha256"])
    # The same command continues with the next step; the skipped updates count until one succeeds.
    again = unstable(actor, tmp_path, [5])
    assert (again.resumed_from, again.progress.skipped_updates) == (5, 4)
    with pytest.raises(TrainingStopped, match="step 6: 4 updates in a row were skipped"):
        ended(again)
    rows = again.folder.read_rollouts("step_000006") or []
    assert {row["adapter_sha256"] for row in rows} == {hashes[-1]} == {hashes[2]}
    fine = unstable(actor, tmp_path, [7])
    assert ended(fine) == "finished"
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


def test_the_batch_of_a_skipped_sft_update_is_kept(actor: ColocatedActor, tmp_path: Path):
    run = process(
        actor,
        tmp_path,
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 2, "sequences_per_step": 2},
        budget={"steps": 3},
    )
    sft_update = run.worker.sft_update

    async def skipped(sequences: Any) -> dict[str, float]:
        return await sft_update(sequences) | {"skipped_updates": 1.0, "loss": float("nan")}

    run.worker.sft_update = skipped  # type: ignore[method-assign]
    assert ended(run) == "finished"
    assert [event["batch"] for event in run.events("update_skipped")] == [
        f"rollouts/sft_{step:06d}.jsonl" for step in (1, 2)
    ]
    rows = run.folder.read_rollouts("sft_000001") or []
    assert {row["sequence"] for row in rows} == {0, 1}
    assert "sft/loss" not in run.folder.metrics[0]
