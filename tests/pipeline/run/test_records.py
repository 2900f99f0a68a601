"""Records of a step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.contracts.rollouts import NO_TEXT, Rollout, RolloutName, RolloutRequest, VersionSpan
from pipeline.evaluate.evaluation import Answer, Evaluation
from pipeline.rollout.advantages import GroupStats
from pipeline.rollout.metrics import step_metrics
from pipeline.run.records import Console, Records, evaluation_line, rollout_records
from pipeline.run.run_folder import RunFolder
from tests.fakes import FRESH, FakeTracker, completion, make_config

STATS = GroupStats(mixed=1, all_equal=2, short=3, excluded=4, overflow=5)


def rollout(text: str, correct: float | None, *, ended: bool = True) -> Rollout:
    request = RolloutRequest(RolloutName("train", 6, 9, len(text)), np.array([2, 5], np.int32))
    drawn = completion(request, text, ended=ended, version=6)
    reward = None if correct is None else correct + 0.5
    given = replace(NO_TEXT, completion=text)
    return Rollout(drawn, given, {"correct": correct, "format": 0.5}, reward, 0.25)


ROLLOUTS = [rollout("abc", 1.0), rollout("a", None), rollout("", 0.0), rollout("abcdef", 0.5)]
CUT = rollout("abcdef", None, ended=False)


def test_a_steps_metrics():
    metrics = step_metrics([*ROLLOUTS, CUT], STATS)
    assert metrics == {
        "reward/mean": pytest.approx(1.0),
        "reward/std": pytest.approx((0.5 / 3) ** 0.5),
        "reward/excluded_share": pytest.approx(2 / 5),
        "reward/correct": pytest.approx(0.5),
        "reward/correct_errors": 2.0,
        "reward/format": 0.5,
        "reward/format_errors": 0.0,
        "rollout/tokens_mean": pytest.approx((4 + 2 + 1 + 7 + 6) / 5),
        "rollout/tokens_max": 7.0,
        "rollout/ended_share": 0.8,
        "rollout/stop_string_share": 0.0,
        "groups/mixed": 1.0,
        "groups/all_equal": 2.0,
        "groups/short": 3.0,
        "groups/excluded_rollouts": 4.0,
        "groups/overflow": 5.0,
    }


def test_stop_string_endings_have_a_separate_share():
    by_text = [
        replace(one, completion=replace(one.completion, stop_reason="stop_string"))
        for one in ROLLOUTS[:2]
    ]
    metrics = step_metrics([*by_text, ROLLOUTS[2], CUT], STATS)
    assert metrics["rollout/ended_share"] == 0.75
    assert metrics["rollout/stop_string_share"] == 0.5
    assert rollout_records(by_text, tokens=False)[0]["stop_reason"] == "stop_string"


def test_in_a_mixture_each_source_has_its_own_metrics():
    sources = ["train", "more", "more", "train"]
    mixed = [replace(one, source=name) for one, name in zip(ROLLOUTS, sources, strict=True)]
    metrics = step_metrics(mixed, STATS)
    own = {name: value for name, value in metrics.items() if name.count("/") == 2}
    assert own == {
        "reward/more/mean": 0.5,
        "reward/more/std": 0.0,
        "reward/more/excluded_share": 0.5,
        "reward/more/correct": 0.0,
        "reward/more/correct_errors": 1.0,
        "reward/more/format": 0.5,
        "reward/more/format_errors": 0.0,
        "rollout/more/count": 2.0,
        "rollout/more/tokens_mean": 1.5,
        "reward/train/mean": 1.25,
        "reward/train/std": 0.25,
        "reward/train/excluded_share": 0.0,
        "reward/train/correct": 0.75,
        "reward/train/correct_errors": 0.0,
        "reward/train/format": 0.5,
        "reward/train/format_errors": 0.0,
        "rollout/train/count": 2.0,
        "rollout/train/tokens_mean": 5.5,
    }
    assert {name: metrics[name] for name in metrics.keys() - own.keys()} == step_metrics(
        ROLLOUTS, STATS
    )
    assert rollout_records(mixed[1:2], tokens=False)[0]["source"] == "more"


def test_a_step_without_any_reward_has_metrics_too():
    metrics = step_metrics([CUT], STATS)
    # An error is not a zero: without values there is no mean.
    assert not {"reward/mean", "reward/std", "reward/correct"} & metrics.keys()
    assert (metrics["reward/excluded_share"], metrics["reward/correct_errors"]) == (1.0, 1.0)


ROW = {
    "prompt_id": 9,
    "sample": 3,
    "step": 6,
    "versions": [6],
    "version_tokens": [4],
    "adapter_sha256": FRESH,
    "text": "abc",
    "num_tokens": 4,
    "stop_reason": "eos",
    "rewards": {"correct": 1.0, "format": 0.5},
    "reward": 1.5,
    "advantage": 0.25,
}


def test_a_rollouts_row():
    assert rollout_records(ROLLOUTS[:1], tokens=False) == [ROW]
    (row,) = rollout_records([CUT], tokens=False)
    assert (row["stop_reason"], row["num_tokens"]) == ("length", 6)
    assert (row["rewards"]["correct"], row["reward"]) == (None, None)


def test_a_rollouts_row_with_tokens():
    (row,) = rollout_records(ROLLOUTS[:1], tokens=True)
    drawn = ROLLOUTS[0].completion
    assert row == {
        **ROW,
        "prompt_tokens": [2, 5],
        "tokens": [97, 98, 99, 1],
        "logprobs": drawn.logprobs.tolist(),
    }
    assert np.array_equal(np.float32(row["logprobs"]), drawn.logprobs)
    kept = replace(drawn, processed_logprobs=drawn.logprobs / 2)
    (cut,) = rollout_records([replace(ROLLOUTS[0], completion=kept)], tokens=True)
    assert cut == {**row, "processed_logprobs": (drawn.logprobs / 2).tolist()}
    assert rollout_records([replace(ROLLOUTS[0], completion=kept)], tokens=False) == [ROW]


def test_a_rollouts_row_has_the_version_of_each_span():
    drawn = replace(
        ROLLOUTS[0].completion, earlier_spans=(VersionSpan(4, "a", 1), VersionSpan(5, "b", 2))
    )
    assert rollout_records([replace(ROLLOUTS[0], completion=drawn)], tokens=False) == [
        {**ROW, "versions": [4, 5, 6], "version_tokens": [1, 2, 1]}
    ]


def test_a_step_without_rollouts_has_no_reward_metric():
    assert step_metrics([], GroupStats(0, 0, 0, 0)) == {
        "groups/mixed": 0.0,
        "groups/all_equal": 0.0,
        "groups/short": 0.0,
        "groups/excluded_rollouts": 0.0,
        "groups/overflow": 0.0,
    }


METRICS = {
    "reward/mean": 0.12345,
    "reward/excluded_share": 0.0,
    "rollout/tokens_mean": 20.04,
    "groups/mixed": 3.0,
    "time/step_s": 1.26,
}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    config = make_config(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    folder.close()
    return Records(folder, FakeTracker(), Console(total=9, done=0))


def test_a_step_goes_to_folder_tracker_and_console(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    records.step(7, "step_000007", METRICS, ROLLOUTS, tokens=False)
    assert records.folder.metrics == [{"step": 7, **METRICS}]
    assert records.folder.read_rollouts("step_000007") == rollout_records(ROLLOUTS, tokens=False)
    assert isinstance(records.tracker, FakeTracker)
    assert records.tracker.logged == [(7, METRICS)]
    assert capsys.readouterr().out == "step 7/9  reward 0.123  tokens 20.0  mixed 3  1.3 s\n"


def test_a_mean_is_never_shown_without_the_excluded_share(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    records.step(
        7, "step_000007", {**METRICS, "reward/excluded_share": 185 / 192}, ROLLOUTS, tokens=False
    )
    shown = capsys.readouterr().out
    assert shown == "step 7/9  reward 0.123 (96.4% excluded)  tokens 20.0  mixed 3  1.3 s\n"


def test_metrics_that_are_not_finite_are_left_out(records: Records):
    bad = {"learner/loss": float("nan"), "learner/grad_norm": float("inf")}
    records.step(7, "step_000007", METRICS | bad, ROLLOUTS, tokens=False)
    sft = {"sft/loss": 1.5, "sft/tokens_trained": 3.0, "time/step_s": 1.0}
    records.sft_step(8, sft | {"sft/grad_norm": float("nan")})
    assert records.folder.metrics == [{"step": 7, **METRICS}, {"step": 8, **sft}]
    assert isinstance(records.tracker, FakeTracker)
    assert records.tracker.logged == [(7, METRICS), (8, sft)]


@pytest.mark.filterwarnings("error")
def test_a_mean_of_huge_rewards_is_no_error():
    huge = [replace(one, reward=1.7e308) for one in ROLLOUTS]
    assert step_metrics(huge, STATS)["reward/excluded_share"] == 0.0


def test_a_skipped_update_names_the_file_that_keeps_its_batch(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    records.skipped_update(7, "its loss is nan", batch="step_000007")
    (entry,) = records.folder.events("update_skipped")
    facts = {"step": 7, "why": "its loss is nan", "batch": "rollouts/step_000007.jsonl"}
    assert {name: entry[name] for name in facts} == facts
    assert capsys.readouterr().out == (
        "step 7: the update was skipped: its loss is nan; its batch is in "
        f"{records.folder.rollouts}/step_000007.jsonl\n"
    )


def test_an_evaluation_is_journaled_shown_and_sent(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    answers = [
        Answer(id_, 0, "text", "1", "1", id_ < 2, id_ != 3, "eos", num_tokens=5) for id_ in range(4)
    ]
    found = Evaluation(tuple(answers))
    file = "validation_000020"
    returned = records.evaluation(
        "validation", 20, found.summary(), answers=found.rows, adapter="abc", file=file
    )
    (entry,) = records.folder.events("evaluated")
    low, high = found.accuracy.ci95
    told = {"name": "validation", "step": 20, "adapter_sha256": "abc", "accuracy": 0.5, "n": 4}
    told |= {"ci95": [low, high], "file": "validation_000020", "rows": 4}
    assert entry | told == entry
    assert entry | {**returned, "ci95": [low, high]} == entry
    assert records.folder.read_answers(entry) == found.rows
    said = f"validation: accuracy 0.500 [{low:.3f}, {high:.3f}] on 4 prompts, 75.0% well formed\n"
    assert capsys.readouterr().out == said
    assert isinstance(records.tracker, FakeTracker)
    ((step, sent),) = records.tracker.logged
    assert (step, sent["eval/validation/accuracy"], sent["eval/validation/well_formed"]) == (
        20,
        0.5,
        0.75,
    )


def test_an_event_is_journaled_and_shown(records: Records, capsys: pytest.CaptureFixture[str]):
    records.event("exported", "export: there", folder="there")
    (entry,) = records.folder.events("exported")
    assert entry["folder"] == "there"
    assert capsys.readouterr().out == "export: there\n"


def test_reward_errors_are_shown_with_the_first_reason(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    records.reward_errors(4, {"length": ["raised KeyError: 'x'", "returned nan"]})
    (entry,) = records.folder.events("reward_errors")
    assert (entry["step"], entry["name"], entry["count"]) == (4, "length", 2)
    assert entry["first"] == "raised KeyError: 'x'"
    told = "step 4: 2 rollout(s) without reward 'length': raised KeyError: 'x'\n"
    assert capsys.readouterr().out == told


def test_a_comparison_is_shown(records: Records, capsys: pytest.CaptureFixture[str]):
    records.comparison(
        "test",
        {
            "before": {"accuracy": 0.25},
            "after": {"accuracy": 0.625},
            "paired_difference": 0.375,
            "paired_ci95": [-0.0126, 0.7],
            "paired_p": 0.03125,
        },
    )
    assert capsys.readouterr().out == (
        "test accuracy 25.0% -> 62.5%: +37.5 points [-1.3, +70.0], paired p = 3.1e-02\n"
    )


def test_an_evaluation_of_several_samples_shows_pass_at_k_and_majority():
    summary = {
        "accuracy": 0.5,
        "n": 4,
        "samples": 8,
        "ci95": (0.15, 0.85),
        "well_formed": 0.75,
        "pass@8": 0.9,
        "majority@8": 0.6,
    }
    assert evaluation_line(summary) == (
        "accuracy 0.500 [0.150, 0.850] on 4 prompts x 8 samples, pass@8 0.900, "
        "majority@8 0.600, 75.0% well formed"
    )


def test_the_lines_of_a_score(records: Records, capsys: pytest.CaptureFixture[str]):
    before = {
        "metric": "style",
        "score": 0.5,
        "n": 3,
        "prompts": 4,
        "ci95": [0.25, 0.75],
        "excluded": 0.25,
        "samples": 1,
        "well_formed": 0.75,
    }
    after = {**before, "score": 2e6, "excluded": 0.0, "ci95": None}
    assert evaluation_line(before) == (
        "style 0.500 [0.250, 0.750] on 4 prompts, 25.0% excluded, 75.0% well formed"
    )
    assert evaluation_line(after) == "style 2e+06 on 4 prompts, 75.0% well formed"
    none = {**before, "score": None, "ci95": None, "n": 0, "excluded": 1.0}
    assert evaluation_line(none).startswith("style none on 4 prompts, 100.0% excluded")
    change = {"paired_difference": -0.5, "paired_ci95": [-1.0, 0.125], "paired_p": 0.03125}
    records.comparison("test", {"before": before, "after": {**after, "score": 0.0}, **change})
    missing = dict.fromkeys(change)
    records.comparison("test", {"before": before, "after": none, **missing})
    assert capsys.readouterr().out.splitlines() == [
        "test style 0.500 -> 0.000: -0.500 [-1.000, +0.125], paired p = 3.1e-02",
        "test style 0.500 -> none: no prompt has a score in both",
    ]


def test_changed_rewards_are_shown_and_marked_at_the_next_step(
    records: Records, capsys: pytest.CaptureFixture[str]
):
    records.rewards_changed(3, [])
    records.rewards_changed(3, [("rewards.functions.style.weight", 1.0, 2.0)])
    assert capsys.readouterr().out.splitlines() == [
        "the rewards have changed after step 3:",
        "  rewards.functions.style.weight: was 1.0, now 2.0",
    ]
    assert isinstance(records.tracker, FakeTracker)
    assert records.tracker.logged == [(4, {"reward/changed": 1.0})]
    # A later process sends it again with the metrics of that step.
    records.folder.journal("rewards_changed", after_step=3, changes=[])
    assert records.logged(until=3) == []
    assert records.logged(until=4) == [(4, {"reward/changed": 1.0})]


def test_a_console_line_without_a_known_number_of_steps(capsys: pytest.CaptureFixture[str]):
    Console(total=None, done=0).step(3, "")
    assert capsys.readouterr().out.startswith("step 3/?  ")


def test_the_progress_bar_starts_at_the_resumed_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console(total=9, done=6)
    console.say("hello")
    console.step(7, "reward 0.123")
    console.close()
    shown = capsys.readouterr()
    assert shown.out == "hello\n"
    assert "6/9" in shown.err
    assert "7/9" in shown.err
    assert "reward 0.123" in shown.err
