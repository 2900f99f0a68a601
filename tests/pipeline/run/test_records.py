"""Records of a step."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.evaluate.evaluation import Answer, Evaluation
from pipeline.run.console import Console
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from rewards.base import RewardError
from tests.run_process import FakeTracker
from tests.samples import make_config

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    config = make_config(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    folder.close()
    return Records(folder, FakeTracker(), Console(now=lambda: NOON))


def test_the_finite_metrics_of_a_step_go_to_folder_tracker_and_console(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    known = {"rollout/entropy": 0.25, "time/step_s": 1.26}
    records.step(7, known | {"learner/loss": float("nan"), "learner/grad_norm": float("inf")})
    assert records.folder.metrics == [{"step": 7, **known}]
    assert isinstance(records.tracker, FakeTracker)
    assert records.tracker.logged == [(7, known)]
    line = "2026-11-23T12:00:00Z step 7/?  entropy 0.250  step time 1.3 s\n"
    assert capsys.readouterr().out == line


def test_an_evaluation_is_journaled_shown_and_sent(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    answers = [
        Answer(id_, 0, "text", "1", "1", id_ < 2, id_ != 3, "eos", num_tokens=5) for id_ in range(4)
    ]
    found = Evaluation(tuple(answers))
    entry = records.evaluation(
        "validation", 20, found.summary(), answers=found.rows, adapter="abc", file="validation_20"
    )
    (journaled,) = records.folder.events("evaluated")
    told = {**entry, "step": 20, "adapter_sha256": "abc", "accuracy": 0.5, "n": 4}
    assert journaled | told | {"ci95": list(entry["ci95"])} == journaled
    assert records.folder.read_rollouts("validation_20") == found.rows
    said = "validation: accuracy 50.0% [15.0%, 85.0%] on 4 prompts, 75.0% well formed\n"
    assert capsys.readouterr().out == said
    assert isinstance(records.tracker, FakeTracker)
    ((step, sent),) = records.tracker.logged
    assert (step, sent["eval/validation/accuracy"]) == (20, 0.5)


def test_the_first_error_of_each_kind_is_shown_and_all_are_journaled_by_cause(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    def raised(what: str, line: int) -> RewardError:
        return RewardError("raised", f"raised ValueError: {what} (mine.py:{line})")

    late = RewardError("timed_out", "took longer than 30 s")
    records.reward_errors(4, {"length": [raised("'a'", 3), late, raised("'b'", 3)]})
    records.reward_errors(5, {"length": [raised("'c'", 3), raised("'d'", 8)], "other": [late]})
    shown = [line.partition(";")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "step 4: reward 'length' raised ValueError: 'a' (mine.py:3)",
        "step 4: reward 'length' took longer than 30 s",
        "step 5: reward 'length' raised ValueError: 'd' (mine.py:8)",
        "step 5: reward 'other' took longer than 30 s",
    ]
    entries = list(records.folder.events("reward_errors"))
    counts = [(entry["step"], entry["name"], entry["count"]) for entry in entries]
    assert counts == [(4, "length", 3), (5, "length", 2), (5, "other", 1)]
    assert entries[0]["causes"] == {"raised": 2, "timed_out": 1}
    assert entries[0]["first"] == "raised ValueError: 'a' (mine.py:3)"
