"""The verdict, on records of a healthy run, and on the same with a planted problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.report.run_records import RunRecords
from pipeline.run.report.verdict import learning, verdict

STEPS = 12
Change = Callable[[int], Mapping[str, float]]
STARTED = {"event": "started", "elapsed_s": 10.0, "used_before_s": 0.0, "seconds": {"compile": 10}}


def metrics(step: int) -> dict[str, float]:
    """A step of a run that learns: the reward rises from 0.3, with some noise."""
    noise = 0.01 * (step * 7 % 5 - 2)
    return {
        "step": step,
        "reward/mean": 0.3 + 0.02 * step + noise,
        "groups/mixed": 20.0,
        "groups/all_equal": 4.0,
        "time/step_s": 4.0,
        "time/sample_s": 1.0,
        "time/reward_s": 0.1,
        "time/learn_s": 2.9,
        "time/elapsed_s": 10.0 + 4 * step,
        "time/devices/decode_s": 0.9,
        "time/devices/update_s": 2.9,
    }


def run(
    *,
    change: Change = lambda _: {},
    journal: Sequence[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    steps: int = STEPS,
) -> RunRecords:
    """Records of a run: metrics of a step that differ, further entries of the journal."""
    return RunRecords(
        path=Path("runs/planted"),
        config={"run": {"name": "planted"}, "rewards": {"functions": [{"name": "correct"}]}},
        journal=[{"event": "resumed", "step": 0}, STARTED, *journal],
        summary=summary or {},
        metrics=[{**metrics(step), **change(step)} for step in range(1, steps + 1)],
    )


def alarm(rule: str, *, step: int = 10) -> dict[str, Any]:
    """A journal entry."""
    return {"event": "alarm", "rule": rule, "step": step, "fact": "the value is 0.99"}


def test_a_healthy_run_has_no_problem():
    found = verdict(run())
    assert (found.problems, found.health.level, found.learning.level) == ([], "good", "good")
    assert found.bound.sentence == "Bound by the update."
    assert found.bound.evidence.startswith("the update 72%, rollout generation 25%, rewards 2%")
    none = verdict(run(steps=0))
    assert none.learning.sentence == "Not known yet: too few steps."
    assert none.bound.sentence == "Not known: no step has ended."
    assert (none.problems, none.learning.level) == ([], "note")


@pytest.mark.parametrize(
    ("records", "sentence", "evidence"),
    [
        (
            run(journal=[alarm("excluded", step=7)]),
            "The value is 0.99.",
            "alarm excluded at step 7: the value is 0.99",
        ),
        (
            run(summary={"ended": "finished", "untrained_export": "none was better"}),
            "The export is the model before training.",
            "none was better",
        ),
        (
            run(journal=[{"event": "evaluation_notice", "what": "the accuracy is 0%"}]),
            "Before training all answers to a set had the same result.",
            "the accuracy is 0%",
        ),
    ],
)
def test_a_planted_problem_is_named_and_no_other(records: RunRecords, sentence: str, evidence: str):
    found = verdict(records)
    assert [(one.sentence, one.evidence) for one in found.problems] == [(sentence, evidence)]
    assert sentence in found.health.sentence
    assert found.next[0] == found.problems[0].advice


def test_an_alarm_of_a_rule_that_is_gone_is_named_without_advice():
    (found,) = verdict(run(journal=[alarm("throughput_down")])).problems
    assert (found.sentence, found.advice) == ("The value is 0.99.", "")


def test_alarms_and_faults_that_a_resume_rolled_back_are_left_out():
    rolled_back = run(journal=[alarm("excluded", step=8), {"event": "resumed", "step": 4}])
    assert verdict(rolled_back).problems == []


@pytest.mark.parametrize(("slope", "level"), [(0.02, "good"), (-0.02, "bad"), (0.0, "note")])
def test_without_evaluations_the_trend_of_the_reward_decides(slope: float, level: str):
    noise = [0.01, -0.02, 0.0, 0.02, -0.01, 0.01, -0.02, 0.015, -0.01, 0.0, 0.02, -0.005]
    found = learning(run(change=lambda step: {"reward/mean": 0.3 + slope * step + noise[step - 1]}))
    assert found.level == level
    shown = found.evidence.partition(" in 100 steps")[0]
    assert float(shown.split()[2]) == pytest.approx(100 * slope, abs=0.3)
