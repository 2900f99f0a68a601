"""Alarms of a run: reported, acted on, and the same after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.protocols import WorkerDied
from pipeline.rollout.workers import TrainingStopped
from rewards.base import Outcome, RewardInput
from tests.fakes import Disk, Process, Script, left_behind, validated
from tests.samples import make_config, make_data

RULE: dict[str, Any] = {"above": 0.4, "steps": 1}
# The entropy of the fake sampler is another one with each adapter.
QUIET: dict[str, Any] = {"entropy_falls": {"action": "off"}}


def alarmed(
    folder: Path, action: str, *, disk: Disk, script: Script | None = None, **alarms: Any
) -> Process:
    """A run of 6 steps, some of which have as many groups with equal rewards as others."""
    config = make_config(
        folder,
        alarms={"all_equal": {**RULE, "action": action}, **QUIET, **alarms},
        budget={"steps": 6},
        checkpoint={"every_steps": 100},
    )
    return Process(config, disk=disk, script=script)


def alarms(run: Process) -> list[int]:
    """Steps of the alarms that no resume has rolled back."""
    return [entry["step"] for entry in run.folder.valid_entries("alarm")]


@pytest.fixture
def logged(tmp_path: Path) -> Process:
    """A finished run with two alarms."""
    run = alarmed(tmp_path / "log", "log", disk=Disk())
    assert run.run() == "finished"
    return run


def test_an_alarm_is_journaled_shown_and_sent_to_wandb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = alarmed(tmp_path, "log", disk=Disk())
    run.run()
    groups = [(row["groups/all_equal"], row["groups/mixed"]) for row in run.folder.metrics]
    beyond = [equal / (equal + mixed) > 0.4 for equal, mixed in groups]
    began = [now and not before for before, now in zip([False, *beyond], beyond, strict=False)]
    expected = [step for step, is_alarm in enumerate(began, start=1) if is_alarm]
    assert len(expected) > 1
    assert alarms(run) == expected
    assert run.tracker.alerts == [("WARN", "alarm all_equal")] * len(expected)
    shown = capsys.readouterr().out
    assert shown.count("alarm all_equal: step ") == len(expected)


def test_promise_5_a_part_that_is_always_none_raises_an_alarm(tmp_path: Path):
    run = Process(make_config(tmp_path, budget={"steps": 4}, alarms=QUIET), disk=Disk())
    score = run.scorer.score

    async def without_format(inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        return [{**row, "format": Outcome(None)} for row in await score(inputs)]

    run.scorer.score = without_format  # type: ignore[method-assign]
    assert run.run() == "finished"
    (alarm,) = run.events("alarm")
    assert (alarm["rule"], alarm["part"], alarm["step"]) == ("always_none", "format", 3)
    # It is left out of the sum: no rollout is excluded.
    assert [row["reward/excluded_share"] for row in run.folder.metrics] == [0.0] * 4


def test_promise_3_a_resumed_run_raises_the_same_alarms(tmp_path: Path):
    # The last two steps are beyond the threshold, whichever process trains them.
    alarms_too: dict[str, Any] = {"length_correlation": {"above": 0.0, "steps": 2}}
    logged = alarmed(tmp_path / "whole", "log", disk=Disk(), **alarms_too)
    logged.run()
    correlations = [row.get("reward/corr_length") for row in logged.folder.metrics]
    assert [value not in {0.0, None} for value in correlations[-3:]] == [False, True, True]
    assert alarms(logged)[-2:] == [6, 6]
    for step in range(1, 6):
        disk, script = Disk(), Script()
        script.on[f"learner.update {step}"] = script.stop.set
        folder = tmp_path / f"{step}"
        assert alarmed(folder, "log", disk=disk, script=script, **alarms_too).run() == "interrupted"
        resumed = alarmed(folder, "log", disk=disk, **alarms_too)
        assert resumed.run() == "finished"
        assert alarms(resumed) == alarms(logged)
        assert left_behind(resumed.folder) == left_behind(logged.folder)


def test_a_repeated_step_sends_no_alert_again(logged: Process, tmp_path: Path):
    def dies() -> None:
        raise WorkerDied("learner", "its process ended unexpectedly")

    disk, folder, first_alarm = Disk(), tmp_path / "repeated", alarms(logged)[0]
    dying = alarmed(
        folder, "log", disk=disk, script=Script(on={f"learner.update {first_alarm}": dies})
    )
    with pytest.raises(WorkerDied):
        dying.run()
    dying.folder.close()
    resumed = alarmed(folder, "log", disk=disk)
    assert resumed.run() == "finished"
    assert len(list(resumed.folder.events("alarm"))) == len(logged.tracker.alerts) + 1
    assert dying.tracker.alerts + resumed.tracker.alerts == logged.tracker.alerts


def test_promise_3_steps_with_new_rewards_count_after_a_rollback_before_the_change(
    tmp_path: Path,
):
    disk, script = Disk(), Script()
    # Steps 5 and 6 are beyond the threshold.
    rules: dict[str, Any] = {"length_correlation": {"above": 0.0, "steps": 2}}
    script.on["learner.update 4"] = script.stop.set
    first = alarmed(tmp_path, "log", disk=disk, script=script, **rules)
    assert first.run() == "interrupted"
    assert [row["step"] for row in first.folder.metrics] == [1, 2, 3, 4, 5]
    # The five steps followed a rollback to step 0, which the rewards had changed before.
    first.folder.journal("rewards_changed", after_step=9, changes=[])
    first.folder.journal("resumed", step=0)
    resumed = alarmed(tmp_path, "log", disk=disk, **rules)
    assert resumed.run() == "finished"
    last = [entry["rule"] for entry in resumed.events("alarm") if entry["step"] == 6]
    assert last == ["all_equal", "length_correlation"]


def test_a_checkpoint_follows_the_step_of_the_alarm(logged: Process, tmp_path: Path):
    run = alarmed(tmp_path, "checkpoint", disk=Disk())
    run.run()
    assert [entry["step"] for entry in run.events("checkpoint")] == [*alarms(logged), 6]
    assert left_behind(run.folder) == left_behind(logged.folder)


def test_a_stopped_run_keeps_the_step_before_the_alarm_and_goes_on_without_the_rule(
    logged: Process, tmp_path: Path
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

    def disagreeing() -> Process:
        run = Process(config, disk=disk)
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


def worse(folder: Path, action: str, *, disk: Disk, every: int = 1) -> Process:
    """A run of 2 steps, whose last version answers none of 4 validation prompts, not all."""
    config = make_config(
        folder,
        data={"validation": {"path": "validation.jsonl"}},
        eval={"every_steps": every},
        alarms={"validation_falls": {"action": action}, **QUIET},
        budget={"steps": 2},
    )
    run = Process(config, disk=disk, data=make_data(validation=4))
    run.samplers[0].skill = lambda version: 0.0 if version == 2 else 1.0
    return run


def test_the_last_validation_raises_an_alarm_too(tmp_path: Path):
    run = worse(tmp_path, "log", disk=Disk())
    assert run.run() == "finished"
    (alarm,) = run.events("alarm")
    assert (alarm["rule"], alarm["step"]) == ("validation_falls", 2)
    assert alarm["fact"] == (
        "the validation is 0.0%, 2.0 half-widths of the 95% interval below that before training, "
        "100.0% [51.0%, 100.0%]"
    )
    assert (run.folder.path / "export").exists()


def test_an_alarm_on_a_validation_stops_once_and_the_same_command_finishes(tmp_path: Path):
    disk = Disk()
    first = worse(tmp_path, "stop", disk=disk)
    with pytest.raises(TrainingStopped, match=r"^alarm validation_falls: step 2: .* the run stops"):
        first.run()
    assert max(disk) == 2
    resumed = worse(tmp_path, "stop", disk=disk)
    assert resumed.run() == "finished"
    assert alarms(resumed) == [2]


class Killed(BaseException):
    """The process ends at once."""


@pytest.mark.parametrize(
    ("action", "ends"), [("log", ["finished"] * 2), ("stop", ["stopped", "finished"])]
)
def test_a_kill_between_a_validation_and_its_alarm_loses_no_alarm(
    tmp_path: Path, action: str, ends: list[str]
):
    def killed(event: str, **facts: Any) -> None:
        if event == "alarm":
            raise Killed
        journal(event, **facts)

    # The last validation follows the last checkpoint, and is not repeated.
    disk = Disk()
    first = worse(tmp_path, action, disk=disk, every=5)
    journal, first.folder.journal = first.folder.journal, killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.run()
    assert (validated(first.folder), alarms(first)) == ([0, 2], [])
    found: list[str] = []
    for _ in range(2):  # the second one repeats nothing
        resumed = worse(tmp_path, action, disk=disk, every=5)
        try:
            found.append(resumed.run())
        except TrainingStopped:
            found.append("stopped")
        assert (resumed.resumed_from, validated(resumed.folder)) == (2, [0, 2])
        assert alarms(resumed) == [2]
    assert found == ends
