"""Single decisions of the controller: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.contracts.decisions import EXPORT, SYNC, VALIDATION, JournalEntry, evaluation_part
from pipeline.contracts.steering import Request, Verb
from pipeline.control.controller import RunController
from pipeline.control.deadline import Deadline
from pipeline.control.duties import BestVersion, Duty, Exported, RunStatus
from tests.fakes import make_config

VALIDATED: Mapping[str, Any] = {
    "data": {"validation": {"path": "validation.jsonl"}},
    "eval": {"every_steps": 2},
}
TIMED: Mapping[str, Any] = {"budget": {"steps": None, "time": "1000s"}}


def controller(
    config: Config, *, entries: Sequence[Mapping[str, Any]] = (), step: int = 0
) -> RunController:
    deadline = Deadline(
        config.budget.steps,
        config.budget.time_s,
        prompts=(config.rollout.prompts_per_step, config.rollout.fewest_prompts),
        validates=config.eval.validates,
    )
    return RunController(config, deadline, entries=entries, step=step, test_prompts=4)


def duties(found: RunController, status: RunStatus, now_s: float = 0.0) -> list[Duty]:
    """All duties that are due while the status stays the same."""
    due = []
    while duty := found.due(status, now_s):
        due.append(duty)
    return due


def kinds(due: Sequence[Duty]) -> list[str]:
    return [duty.kind for duty in due]


def test_a_checkpoint_is_due_after_some_steps_or_some_seconds():
    checkpoint = {"every_steps": 100, "every_s": 50.0}
    found = controller(make_config(Path("runs"), budget={"steps": 5}, checkpoint=checkpoint))
    duties(found, RunStatus(0))
    due = []
    for number, now_s in enumerate([40.0, 80.0, 120.0, 140.0]):
        found.next(RunStatus(number), now_s)
        due.append(kinds(duties(found, RunStatus(number + 1), now_s)))
    assert due == [[], ["checkpoint"], [], ["checkpoint"]]


def test_a_run_of_steps_starts_trains_and_ends_in_order():
    found = controller(make_config(Path("runs"), budget={"steps": 2}))
    start = ["check_parity", "evaluate_before", "recover_best", "repair_answers"]
    assert kinds(duties(found, RunStatus(0))) == start
    for number in range(2):
        step = found.next(RunStatus(number), 0.0)
        assert step is not None
        assert (step.number, step.phase, step.prompts, step.rate) == (number, "grpo", 2, None)
        assert step.deadline is None
        update = found.may_update(RunStatus(number), 1.0, 0.0)
        assert update is not None
        assert (update.ahead, update.left.steps) == (None, 1 - number)
        due = kinds(duties(found, RunStatus(number + 1)))
        assert due == (["checkpoint"] if number == 1 else [])
    assert found.next(RunStatus(2), 0.0) is None
    end = duties(found, RunStatus(2))
    assert kinds(end) == ["checkpoint", "load_best", "test", "export", "summarize"]
    assert (end[3].adapter, end[3].reason) == ("current", "last")


def test_the_sft_phase_comes_first_and_is_never_sampled_ahead():
    config = make_config(
        Path("runs"),
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "demonstrations.jsonl"}, "completion_column": "text", "steps": 1},
        rollout={"ahead": "one"},
        learner={"importance_cap": 2.0},
        budget={"steps": 3},
    )
    found = controller(config)
    duties(found, RunStatus(0))
    phases, ahead = [], []
    for number in range(3):
        step = found.next(RunStatus(number), 0.0)
        update = found.may_update(RunStatus(number), 1.0, 0.0)
        assert step is not None
        assert update is not None
        phases.append(step.phase)
        ahead.append(update.ahead and update.ahead.number)
        duties(found, RunStatus(number + 1))
    assert phases == ["sft", "grpo", "grpo"]
    assert ahead == [None, 2, None]


def test_the_best_version_is_loaded_tested_and_exported():
    found = controller(make_config(Path("runs"), **VALIDATED, budget={"steps": 3}), step=3)
    best = BestVersion(2, "two")
    status = RunStatus(3, validated=frozenset({0, 2, 3}), best=best)
    duties(found, status)
    assert found.next(status, 0.0) is None
    end = duties(found, status)
    assert kinds(end) == ["checkpoint", "load_best", "test", "export", "summarize"]
    assert end[3].adapter == "best"


@pytest.mark.parametrize("abandoned", [False, True])
def test_an_abandoned_validation_ends_training(abandoned: bool):
    config = make_config(Path("runs"), **VALIDATED, **TIMED, checkpoint={"every_steps": 1})
    found = controller(config)
    exported = Exported(0, "zero", evaluated=True)
    validated = RunStatus(0, frozenset({0}), BestVersion(0, "zero"), exported, "zero")
    duties(found, validated)
    for part in (VALIDATION, EXPORT, evaluation_part("test"), SYNC):
        found.observe(part, 1.0)
    assert found.next(validated, 10.0) is not None
    assert duties(found, validated, 20.0) == [Duty("checkpoint")]
    assert found.next(RunStatus(1, frozenset({0}), validated.best, exported, "one"), 20.0)
    after = RunStatus(2, frozenset({0}), validated.best, exported, "two")
    duty = found.due(after, 30.0)
    assert duty is not None
    assert duty.kind == "validate"
    assert duty.deadline is not None
    if abandoned:
        entry = found.abandoned(40.0)
        assert (entry.event, entry.facts["step"]) == ("abandoned", 2)
    assert kinds(duties(found, after, 40.0)) == ([] if abandoned else ["checkpoint"])
    assert (found.next(after, 40.0) is None) is abandoned


def test_requests_before_an_abandoned_validation_are_done_or_refused():
    config = make_config(Path("runs"), **VALIDATED, **TIMED, checkpoint={"every_steps": 100})
    found = controller(config)
    exported = Exported(0, "zero", evaluated=True)
    status = RunStatus(0, frozenset({0}), BestVersion(0, "zero"), exported, "zero")
    duties(found, status)
    for part in (VALIDATION, EXPORT, evaluation_part("test"), SYNC):
        found.observe(part, 1.0)
    assert found.next(status, 10.0)
    verbs: tuple[Verb, ...] = ("export", "stop-after-step")
    asked = tuple(Request(verb, verb) for verb in verbs)
    after = replace(status, step=2, requests=asked)
    due = [found.due(after, 20.0) for _ in range(3)]
    assert [duty and duty.kind for duty in due] == ["steer", "steer", "validate"]
    found.abandoned(30.0)
    checkpoint, stop = duties(found, after, 30.0)
    (refused,) = checkpoint.journal
    why = "the time left is needed for the end of the run"
    assert refused == JournalEntry(
        "exported_copy", {"step": 2, "failed": why}, f"export was refused after step 2: {why}"
    )
    assert (checkpoint.kind, stop.kind) == ("checkpoint", "stop")
    assert found.next(after, 30.0) is None


def test_validation_by_the_clock_is_journaled_and_replayed():
    config = make_config(
        Path("runs"), data=VALIDATED["data"], eval={"every_minutes": 1.0}, budget={"steps": 9}
    )
    found = controller(config)
    status = RunStatus(0)
    first = duties(found, status)
    assert kinds(first)[2] == "validate"
    assert first[2].journal == (JournalEntry("validation_due", {"step": 0, "elapsed_s": 0.0}),)
    due: dict[int, bool] = {}
    for step in range(1, 5):
        validated = frozenset({0, *(at for at, some in due.items() if some)})
        found.next(RunStatus(step - 1, validated), 25.0 * (step - 1))
        due[step] = "validate" in kinds(duties(found, RunStatus(step, validated), 25.0 * step))
    assert [step for step in due if due[step]] == [3]
    entries = [{"event": "validation_due", "step": step} for step in (0, 3)]
    again = controller(config, entries=entries, step=2)
    duties(again, RunStatus(2, frozenset({0})))
    again.next(RunStatus(2, frozenset({0})), 0.0)
    (duty,) = duties(again, RunStatus(3, frozenset({0})), 1.0)
    assert (duty.kind, duty.journal) == ("validate", ())


def test_an_update_without_time_for_its_export_is_refused():
    config = make_config(Path("runs"), **TIMED)
    found = controller(config)
    exported = Exported(0, "zero", evaluated=True)
    status = RunStatus(0, exported=exported, loaded_sha256="zero")
    duties(found, status)
    found.observe(EXPORT, 100.0)
    step = found.next(status, 0.0)
    assert step is not None
    found.observe_update(step, 50.0)
    assert found.may_update(status, 10.0, 849.0) is not None
    assert found.may_update(status, 10.0, 851.0) is None


def test_a_budget_that_is_too_small_is_refused_with_the_minimum():
    found = controller(make_config(Path("runs"), **TIMED))
    status = RunStatus(0)
    assert [found.due(status, 0.0), found.due(status, 0.0)] == [
        Duty("check_parity"),
        Duty("evaluate_before", found.deadline.reserving(0.0)),
    ]
    found.observe(evaluation_part("test"), 900.0)
    (export, *_, refusal) = duties(found, status, 950.0)
    assert (export.kind, export.reason) == ("export", "rehearsal")
    assert refusal.kind == "refuse"
    assert refusal.error is not None
    assert refusal.error.minimum_s > 1000
    (entry,) = refusal.journal
    assert entry.facts["minimum_s"] == refusal.error.minimum_s


def test_an_abandoned_step_is_followed_by_the_end_of_the_run_alone():
    config = make_config(Path("runs"), **VALIDATED, **TIMED, checkpoint={"every_steps": 1})
    found = controller(config)
    exported = Exported(0, "zero", evaluated=True)
    status = RunStatus(0, frozenset({0}), BestVersion(0, "zero"), exported, "zero")
    duties(found, status)
    for part in (VALIDATION, EXPORT, evaluation_part("test"), SYNC):
        found.observe(part, 1.0)
    assert found.next(status, 10.0) is not None
    assert found.abandoned(500.0).facts["what"] == "the training step"
    assert duties(found, status, 500.0) == []
    assert found.next(status, 500.0) is None
    assert kinds(duties(found, status, 500.0))[0] == "checkpoint"


def test_an_abandoned_validation_does_not_restart_the_interval():
    config = make_config(Path("runs"), data=VALIDATED["data"], eval={"every_minutes": 1.0}, **TIMED)
    found = controller(config, step=3)
    status = RunStatus(3, exported=Exported(3, "three", evaluated=True), loaded_sha256="three")
    while (duty := found.due(status, 70.0)) and duty.kind != "validate":
        pass
    assert duty is not None
    found.abandoned(90.0)
    duties(found, status, 100.0)
    assert found.next(status, 100.0) is not None
    assert "validate" in kinds(duties(found, RunStatus(4), 101.0))
