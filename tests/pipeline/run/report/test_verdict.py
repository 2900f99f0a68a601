from __future__ import annotations

from typing import Any

import pytest

from pipeline.run.report import verdict as module
from pipeline.run.report.run_records import RunRecords
from pipeline.run.report.verdict import learning, verdict
from tests.pipeline.run.report.planted import alarm, run


def test_a_healthy_run_has_no_problem():
    found = verdict(run())
    assert (found.problems, found.health.level, found.learning.level) == ([], "good", "good")
    assert found.bound.sentence == "Bound by the update."
    assert found.bound.evidence.startswith("the update 72%, rollout generation 25%, rewards 2%")
    none = verdict(run(steps=0))
    assert none.learning.sentence == "Not known yet: too few steps."
    assert none.bound.sentence == "Not known: no step has ended."
    assert (none.problems, none.learning.level) == ([], "note")


SKIPPED = {"event": "update_skipped", "step": 3, "why": "its loss is nan", "batch": "b.jsonl"}
FAILED = {"name": "correct", "count": 2, "first": "took longer than 30 s"}


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
        (
            run(journal=[SKIPPED]),
            "Updates were skipped.",
            "1 in all, the first in step 3: its loss is nan",
        ),
        (
            run(journal=[{"event": "reward_errors", "step": 3, **FAILED}]),
            "Rewards failed 2 times; these rollouts are excluded.",
            "the first, of correct: took longer than 30 s",
        ),
    ],
)
def test_a_planted_problem_is_named_and_no_other(records: RunRecords, sentence: str, evidence: str):
    found = verdict(records)
    assert [(one.sentence, one.evidence) for one in found.problems] == [(sentence, evidence)]
    assert sentence in found.health.sentence
    assert found.next[0] == found.problems[0].advice


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


def test_the_best_evidence_is_the_paired_test(monkeypatch: pytest.MonkeyPatch):
    summary = {"metric": "exact_answer", "n": 500}
    change: dict[str, Any] = {
        "before": {**summary, "accuracy": 0.4},
        "after": {**summary, "accuracy": 0.3},
        "paired_difference": -0.1,
        "paired_ci95": [-0.15, -0.05],
        "paired_p": 0.001,
    }
    monkeypatch.setattr(module, "paired_change", lambda *_: change)
    tests = [
        {"event": "evaluated", "name": name, "step": 0, "accuracy": 0.5}
        for name in ("test_before", "test_after")
    ]
    found = learning(run(journal=tests))
    assert (found.level, found.sentence) == ("bad", "No: the test accuracy fell.")
    assert (
        found.evidence
        == "40.0% -> 30.0%: -10.0 points [-15.0, -5.0] on 500 prompts, paired p = 1.0e-03"
    )
