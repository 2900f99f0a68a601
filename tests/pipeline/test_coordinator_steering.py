"""Requests of `launch.control` to a running coordinator, and the resume of a steered run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.record_files import append_row
from pipeline.contracts.steering import Verb
from pipeline.coordinator import Coordinator
from pipeline.evaluate.schedule import EvaluationSchedule
from pipeline.run.requests import append_request
from pipeline.run.run_folder import RunFolder
from tests.fakes import (
    Disk,
    Killed,
    Process,
    Script,
    kill,
    left_behind,
    make_config,
    make_data,
    validated,
)

Ask = tuple[Verb, str | None, Any]
LR: Ask = ("set", "learner.lr", 2e-5)
KL: Ask = ("set", "learner.kl_coef", 0.2)
WEIGHT: Ask = ("set", "rewards.functions.format.weight", 2)
EVERY: Ask = ("set", "eval.every_steps", 5)
STOP: Ask = ("stop-after-step", None, None)
ASKED: dict[int, list[Ask]] = {
    1: [LR, WEIGHT],
    2: [("evaluate", None, None), ("checkpoint", None, None)],
    3: [KL, EVERY, ("extend", None, "1")],
    4: [("export", None, None)],
}
"""Requests that arrive during the update of a step, counted from 0."""


def config(folder: Path, **tables: Any) -> Config:
    usual: dict[str, Any] = {
        "data": {"validation": {"path": "validation.jsonl"}},
        "eval": {"every_steps": 4, "metric": "reward"},
        "budget": {"steps": 5},
        "checkpoint": {"every_steps": 100},
        "learner": {"kl_coef": 0.1},
    }
    return make_config(folder, **(usual | tables))


def ask(folder: RunFolder, verb: Verb, key: str | None = None, value: Any = None) -> str:
    return append_request(folder.path, verb, key=key, value=value).id


def process(
    run: Config, disk: Disk, asked: dict[int, list[Ask]], *, on: dict[Any, Any] | None = None
) -> Process:
    """A process of the run, to which requests arrive; each arrives once."""
    folder = RunFolder.of(run)

    def arrive(step: int) -> Callable[[], None]:
        def act() -> None:
            for one in asked.pop(step, []):
                ask(folder, *one)

        return act

    script = Script(on={f"learner.update {step}": arrive(step) for step in asked} | (on or {}))
    return Process(run, disk=disk, data=make_data(validation=3), script=script)


def test_requests_take_effect_before_the_next_step_in_their_order(tmp_path: Path):
    run = process(config(tmp_path), Disk(), dict(ASKED))
    assert run.run() == "finished"
    # An extension by a step, after five.
    assert run.learner.settings == [
        (5e-5, 0.1), (5e-5, 0.1), (2e-5, 0.1), (2e-5, 0.1), (2e-5, 0.2), (2e-5, 0.2),
    ]  # fmt: skip
    taken = [(one["step"], one["verb"], one.get("key")) for one in run.events("steered")]
    assert taken == [
        (step + 1, verb, key) for step, asked in ASKED.items() for verb, key, _ in asked
    ]
    assert validated(run.folder) == [0, 3, 5, 6]  # requested, by the new interval, the last one
    assert run.disk.keys() >= {3}
    (copy,) = run.events("exported_copy")
    assert (copy["step"], copy["version"]) == (5, 5)
    assert (run.folder.path / "exports" / "step_000005" / "adapter").is_file()
    (lr,) = (one for one in run.events("steered") if one.get("key") == "learner.lr")
    assert (lr["old"], lr["value"]) == (5e-5, 2e-5)


def test_invariant_7_a_steered_run_killed_at_any_call_is_the_same_run(tmp_path: Path):
    whole = process(config(tmp_path / "whole"), Disk(), dict(ASKED))
    assert whole.run() == "finished"
    expected = left_behind(whole.folder)
    steered = [(entry["step"], entry["verb"]) for entry in whole.events("steered")]
    calls = whole.script.calls
    for number in range(calls.index("learner.publish 2"), len(calls)):
        run, disk, asked = config(tmp_path / str(number)), Disk(), dict(ASKED)
        with pytest.raises(Killed):
            (first := process(run, disk, asked, on={number: kill})).run()
        if first.coordinator.requests.pending:
            continue  # the next start takes these up, at another step
        for lost in (False, number == len(calls) - 1):
            if lost:
                for version in set(disk) - {0}:
                    del disk[version]
            again = process(run, disk, asked)
            assert again.run() == "finished", calls[number]
            assert left_behind(again.folder) == expected, calls[number]
            assert again.learner.adapter == whole.learner.adapter
            assert [(one["step"], one["verb"]) for one in again.events("steered")] == steered


def test_a_file_with_the_old_or_the_new_value_resumes_with_the_new_one(tmp_path: Path):
    script = {1: [LR, STOP]}
    first = process(config(tmp_path), disk := Disk(), script)
    assert first.run() == "interrupted"
    assert max(disk) == 2
    for settings in ({}, {"lr": 2e-5}):
        run = config(tmp_path, learner={"kl_coef": 0.1, **settings})
        folder = RunFolder.of(run)
        folder.check(folder.in_force(run))
        assert folder.in_force(run).learner.lr == 2e-5
    other = config(tmp_path, learner={"kl_coef": 0.1, "lr": 3e-5})
    with pytest.raises(ValueError, match=r"learner\.lr: was 2e-05, now 3e-05"):
        RunFolder.of(other).check(RunFolder.of(other).in_force(other))
    again = process(config(tmp_path), disk, {})
    assert again.run() == "finished"
    assert {lr for lr, _ in again.learner.settings} == {2e-5}


def test_a_request_to_stop_ends_one_process_only(tmp_path: Path):
    run, disk = config(tmp_path), Disk()
    first = process(run, disk, {2: [STOP]})
    assert first.run() == "interrupted"
    assert first.folder.summary is not None
    assert (first.folder.summary["ended"], first.folder.summary["steps"]) == ("interrupted", 3)
    assert max(disk) == 3
    disk.clear()
    assert process(run, disk, {}).run() == "finished"


def test_an_export_that_a_killed_process_has_not_finished_is_repeated(tmp_path: Path):
    run, disk = config(tmp_path), Disk()
    asked: dict[int, list[Ask]] = {1: [("checkpoint", None, None), ("export", None, None)]}
    with pytest.raises(Killed):
        process(run, disk, asked, on={"learner.export 2": kill}).run()
    again = process(run, disk, asked)
    assert again.run() == "finished"
    assert again.resumed_from == 2
    (copy,) = again.events("exported_copy")
    assert copy["step"] == 2


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OutOfMemory("export", "planted")]
)
def test_an_export_that_fails_does_not_end_the_run(tmp_path: Path, error: Exception):
    def fail() -> None:
        raise error

    asked: dict[int, list[Ask]] = {1: [("export", None, None)]}
    run = process(config(tmp_path), Disk(), asked, on={"learner.export 2": fail})
    assert run.run() == "finished"
    (copy,) = run.events("exported_copy")
    assert copy["step"] == 2
    assert copy["failed"]


def test_a_request_that_waits_is_taken_up_at_the_next_start(tmp_path: Path):
    run = config(tmp_path)
    with pytest.raises(Killed):
        process(run, disk := Disk(), {1: [LR]}, on={"learner.publish 2": kill}).run()
    again = process(run, disk, {})
    ask(again.folder, *LR)
    again.run()
    assert [entry["step"] for entry in again.events("steered")][-1] == 0
    assert again.learner.settings[0] == (2e-5, 0.1)


def test_a_refused_request_is_journaled_with_the_reason(tmp_path: Path):
    run = process(
        make_config(tmp_path),
        Disk(),
        {0: [("evaluate", None, None), ("set", "learner.lr", -1), ("extend", None, "1h")]},
    )
    assert run.run() == "finished"
    why = [entry["refused"] for entry in run.events("steered")]
    assert why[0].startswith("evaluate: the run has no validation split")
    assert why[1].startswith("learner.lr = -1: must be a number, above 0")
    assert why[2] == "extend 1h: this run has budget.steps; give a number of steps, at least 1"
    assert run.folder.summary is not None
    assert run.folder.summary["steps"] == 3


def test_a_changed_weight_restarts_the_search_for_the_best_version(tmp_path: Path):
    run = process(config(tmp_path), Disk(), {1: [WEIGHT]})
    assert run.run() == "finished"
    (changed,) = run.events("rewards_changed")
    assert changed["after_step"] == 2
    assert changed["changes"] == [["rewards.functions.format.weight", 0.1, 2.0]]
    names = [(entry["name"], entry["step"]) for entry in run.events("evaluated")]
    # The base is scored by the new rewards, and no validation by the old ones counts.
    assert names.count(("test_before", 0)) == 2
    assert sorted(run.coordinator.schedule.validated) == [4, 5]
    assert run.folder.saved_config["rewards"]["functions"][1]["weight"] == 2.0
    # A start after an earlier step has the old rewards, and their validations, until that step.
    run.folder.journal("resumed", step=1)
    assert run.folder.reward_changes == []
    assert [one["step"] for one in run.folder.valid_entries("evaluated", since="rewards_changed")][
        -1
    ] == 0


@pytest.mark.parametrize("where", ["_steer", "adopt", "learner.update 2"])
def test_a_process_killed_while_it_changes_a_weight_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    """Before, between and after the journal's entries of the request and of the changed rewards."""

    def start(run: Config) -> Disk:
        """Steps until the second one; the next process finds a request."""
        first = process(run, disk := Disk(), {1: [STOP]})
        assert first.run() == "interrupted"
        ask(first.folder, *WEIGHT)
        return disk

    every = {"eval": {"every_steps": 1, "metric": "reward"}}
    run = config(tmp_path / "whole", **every)
    whole = process(run, start(run), {})
    assert whole.run() == "finished"
    assert sorted(whole.coordinator.schedule.validated) == [2, 3, 4, 5]

    run = config(tmp_path / "killed", **every)
    disk = start(run)
    with monkeypatch.context() as patch:
        for owner in (Coordinator, EvaluationSchedule):
            if hasattr(owner, where):
                patch.setattr(owner, where, lambda *_, **__: kill())
        with pytest.raises(Killed):
            process(run, disk, {}, on={where: kill}).run()
    again = process(run, disk, {})
    assert again.run() == "finished"
    assert again.resumed_from == 2
    (changed,) = again.events("rewards_changed")
    assert (changed["after_step"], changed["changes"]) == (
        2,
        [["rewards.functions.format.weight", 0.1, 2.0]],
    )
    assert sorted(again.coordinator.schedule.validated) == [2, 3, 4, 5]
    assert left_behind(again.folder) == left_behind(whole.folder)


def test_a_damaged_file_of_requests_does_not_end_the_run(tmp_path: Path):
    run = process(config(tmp_path), Disk(), {1: [LR]})
    (run.folder.path / "control.jsonl").write_text('{"verb": "checkpoint"}\n')
    assert run.run() == "finished"
    assert run.events("control_damaged")


@pytest.mark.parametrize("facts", [{"verb": "pause"}, {"verb": "set"}, {"verb": "extend"}, {}])
def test_a_request_of_another_version_does_not_end_the_run(tmp_path: Path, facts: dict[str, str]):
    run = process(config(tmp_path), Disk(), {})
    ask(run.folder, *LR)
    append_row(run.folder.path / "control.jsonl", {"request": "1", **facts})
    assert run.run() == "finished"
    assert run.events("control_damaged")
    # The one before it counts.
    assert run.learner.settings[0] == (2e-5, 0.1)
