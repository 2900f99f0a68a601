"""The training loop: what a run leaves behind, also when it is interrupted, killed and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from pipeline.data.order import prompts_for_step
from pipeline.rollout import workers
from pipeline.rollout.mismatch import MismatchError
from pipeline.run import record_files, run_folder
from pipeline.types import Completion, Published, RolloutRequest
from rewards.base import Outcome, RewardInput
from tests.fakes import Disk, Killed, Process, Script, kill, left_behind
from tests.resumes import check_same_run
from tests.samples import FRESH, PROBE, changed, make_config, make_data

VALIDATION = {"path": "validation.jsonl"}
PROBE_EFFECT = abs(int(PROBE[:6], 16) - int(FRESH[:6], 16)) / 2**20 / 10
"""What the random adapter changes of a fake log-prob."""


def watched(folder: Path, **tables: Mapping[str, Any]) -> Config:
    """Four steps with a validation after every second one and a checkpoint after every third."""
    return make_config(
        folder,
        data={"validation": VALIDATION},
        eval={"every_steps": 2},
        budget={"steps": 4},
        **{"checkpoint": {"every_steps": 3}, **tables},
    )


def process(config: Config, disk: Disk, script: Script | None = None) -> Process:
    return Process(config, disk=disk, script=script, data=make_data(validation=3))


def test_a_step_trains_on_a_group_for_each_of_its_prompts(tmp_path: Path):
    config = make_config(
        tmp_path, budget={"steps": 2}, rollout={"group_size": 3}, plan={"samplers": 2}
    )
    run = Process(config, disk=Disk())
    run.run()
    prompts = prompts_for_step(make_data().train.prompts, seed=3, step=1, prompts_per_step=2)
    assert [(r.completion.name.prompt_id, r.completion.name.sample) for r in run.learner.seen] == [
        (prompt.id, sample) for prompt in prompts for sample in range(3)
    ]
    assert {rollout.completion.name.step for rollout in run.learner.seen} == {1}
    # Six rollouts in batches of two: the first and third batch go to the first sampler.
    assert "sampler1.generate:train 1" in run.script.calls


def test_temperatures_are_those_of_rollout_and_eval(tmp_path: Path):
    config = make_config(
        tmp_path, rollout={"temperature": 0.7}, eval={"temperature": 0.2}, budget={"steps": 1}
    )
    run = Process(config, disk=Disk())
    heats: dict[str, float] = {}
    draw = run.samplers[0].draw

    def spy(request: RolloutRequest, temperature: float) -> Completion:
        heats[request.name.phase] = temperature
        return draw(request, temperature)

    run.samplers[0].draw = spy  # type: ignore[method-assign]
    run.run()
    assert heats == {"probe": 0.7, "train": 0.7, "test": 0.2}


def test_records_of_a_finished_run(tmp_path: Path):
    run = process(watched(tmp_path), Disk())
    run.run()
    folder = run.folder
    assert [row["step"] for row in folder.metrics] == [1, 2, 3, 4]
    assert sorted(path.name for path in folder.rollouts.iterdir()) == [
        "step_000001.jsonl",
        "step_000002.jsonl",
        "step_000003.jsonl",
        "step_000004.jsonl",
        "test_after.jsonl",
        "test_before.jsonl",
        "validation_000000.jsonl",
        "validation_000002.jsonl",
        "validation_000004.jsonl",
    ]
    # W&B gets the same metrics of a step as metrics.jsonl.
    sent = {step: metrics for step, metrics in run.tracker.logged if "reward/mean" in metrics}
    assert sent == {row.pop("step"): row for row in folder.metrics}
    evaluated = [(entry["name"], entry["step"]) for entry in folder.events("evaluated")]
    assert evaluated == [
        ("test_before", 0),
        ("validation", 0),
        ("validation", 2),
        ("validation", 4),
        ("test_after", 4),
    ]
    assert [entry["step"] for entry in folder.events("checkpoint")] == [0, 3, 4, 4]
    assert run.learner.exported[0].name.phase == "test"
    assert len(run.learner.exported) == 4


def test_no_validation_without_eval_every_steps(tmp_path: Path):
    run = Process(make_config(tmp_path), disk=Disk())
    run.run()
    assert not any("validation" in call for call in run.script.calls)


def test_the_summary_has_every_field_that_is_due(tmp_path: Path):
    script = Script(durations={"sampler0.generate:train": 2.0, "learner.update": 3.0})
    run = Process(make_config(tmp_path), disk=Disk(), script=script)
    run.run()
    summary = run.folder.summary
    assert summary is not None
    rows = [row for step in (1, 2, 3) for row in run.folder.read_rollouts(f"step_{step:06d}") or ()]
    evaluation, time = summary.pop("eval"), summary.pop("time")
    tokens = sum(row["num_tokens"] for row in rows)
    assert time["seconds"] == {"sample": 6.0, "learn": 9.0}
    assert (time["since_submission_s"], time["first_step_s"]) == (15.0, 5.0)
    # Two chips; half of an update is padding.
    assert (time["devices"]["update"], time["devices"]["padding"]) == (2.25, 2.25)
    assert time["devices"]["decode"] + time["devices"]["empty slots"] == 3.0
    goodput = summary.pop("goodput")
    assert (goodput["scheduling"], goodput["runtime"]) == (1.0, 1.0)
    assert goodput["program"] == (time["devices"]["decode"] + 2.25) / 15
    assert summary.pop("speed")["update_tokens_per_s"] == tokens / 9.0
    assert summary.pop("cost") == {}
    assert summary == {
        "ended": "finished",
        "steps": 3,
        "samples": 12,
        "tokens_generated": tokens,
        "tokens_trained": tokens,
        "tokens_padded": tokens,
        "rollouts": {"truncated": 0, "continued": 0, "dropped": 0},
        "wall_s": 15.0,
        "deadline_s": None,
        "adapter_sha256": run.learner.adapter,
        "resumed_from": None,
        "faults": {"reward_errors": 0, "skipped_updates": 0, "restarts": 0},
    }
    for name in ("before", "after"):
        answers = run.folder.read_rollouts(f"test_{name}") or []
        right = [answer["correct"] for answer in answers]
        assert evaluation[name]["n"] == len(right) == 4
        assert evaluation[name]["accuracy"] == np.mean(right)
        low, high = evaluation[name]["ci95"]
        assert 0 <= low <= evaluation[name]["accuracy"] <= high <= 1
    assert {"paired_p", "paired_difference", "paired_ci95"} <= evaluation.keys()
    reported = {**run.tracker.summary, "eval": None}
    assert reported == {**(run.folder.summary or {}), "eval": None}


# --- the sampled policy is the learned policy


def test_promise_1_a_probe_difference_above_the_bound_stops_the_run(tmp_path: Path):
    run = Process(make_config(tmp_path), disk=Disk())
    run.learner.score_error = 0.2
    message = r"of what the adapter changes, allowed 0\.001 \(mismatch\.probe;"
    with pytest.raises(MismatchError, match=message):
        run.run()
    assert not any("train" in call or "test" in call for call in run.script.calls)
    assert (run.folder.summary, run.learner.disk) == (None, {})


@pytest.mark.parametrize(
    ("cap", "corrects"),
    [
        (0.0, "nothing corrects for it (learner.importance_cap is 0)"),
        (
            2.0,
            "importance weights up to 2 correct for it, except for excluded tokens",
        ),
    ],
)
def test_truncated_sampling_distributions_are_reported_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cap: float, corrects: str
):
    config = make_config(
        tmp_path,
        rollout={"top_k": 40, "min_p": 0.05},
        learner={"importance_cap": cap},
        budget={"steps": 2},
    )
    run = Process(config, disk=Disk())
    run.run()
    cut = {"top_k": 40, "top_p": 1.0, "min_p": 0.05}
    assert run.events("truncated_rollouts") == [{**cut, "importance_cap": cap}]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == (
        "rollouts are sampled from a truncated distribution (top_k 40, top_p 1, min_p 0.05): the "
        "sampler is not the policy that is trained; the loss uses log-probs of the full "
        f"distribution, and {corrects}"
    )
    assert sum("truncated distribution" in line for line in shown) == 1


def test_without_truncation_nothing_is_reported(tmp_path: Path):
    run = Process(make_config(tmp_path, budget={"steps": 1}), disk=Disk())
    run.run()
    assert run.events("truncated_rollouts") == []


def test_promise_1_the_probe_is_journaled_and_then_discarded(tmp_path: Path):
    run = Process(make_config(tmp_path, mismatch={"probe": 0.5}, budget={"steps": 1}), disk=Disk())
    run.learner.score_error = 0.01
    run.run()
    ((entry),) = run.events("mismatch")
    assert entry == {"largest": pytest.approx(0.01 / PROBE_EFFECT, rel=1e-3), "bound": 0.5}
    assert run.script.calls.index("sampler0.load 0") < run.script.calls.index(
        "sampler0.generate:test 0"
    )


def test_promise_1_a_sampler_that_keeps_an_old_adapter_is_caught_at_the_sync(tmp_path: Path):
    run = Process(make_config(tmp_path, plan={"samplers": 2}), disk=Disk())
    load = run.samplers[1].load

    async def stale(published: Published) -> str:
        return run.samplers[1].adapter if published.version == 1 else await load(published)

    run.samplers[1].load = stale  # type: ignore[method-assign]
    message = rf"a sampler holds adapter {FRESH[:12]}, version 1 is {'[0-9a-f]' * 12}:"
    with pytest.raises(MismatchError, match=message):
        run.run()
    assert run.learner.version == 1
    assert run.folder.metrics == []


@pytest.mark.parametrize("wrong", [{"version": 7}, {"adapter_sha256": "f" * 64}])
def test_promise_1_a_completion_with_a_wrong_label_is_caught(tmp_path: Path, wrong: dict[str, Any]):
    run = Process(make_config(tmp_path, budget={"steps": 2}), disk=Disk())
    draw = run.samplers[0].draw

    def mislabelled(request: RolloutRequest, temperature: float) -> Completion:
        drawn = draw(request, temperature)
        last = request.name.step == 1 and request.name.sample == 1
        return changed(drawn, **wrong) if last else drawn

    run.samplers[0].draw = mislabelled  # type: ignore[method-assign]
    with pytest.raises(
        MismatchError, match=r"step=1.*sample=1.* was sampled by version .* published"
    ):
        run.run()
    assert run.learner.version == 1


def test_promise_1_every_recorded_rollout_carries_version_and_hash(tmp_path: Path):
    run = Process(make_config(tmp_path), disk=Disk())
    run.run()
    hashes = [FRESH]
    for version, name in enumerate(["step_000001", "step_000002", "step_000003"]):
        rows = run.folder.read_rollouts(name) or []
        assert len(rows) == 4
        assert {tuple(row["versions"]) for row in rows} == {(version,)}
        (sha,) = {row["adapter_sha256"] for row in rows}
        hashes.append(sha)
    assert hashes[:2] == [FRESH, FRESH]
    assert len({*hashes, run.learner.adapter}) == 4


def test_promise_1_a_mean_above_its_bound_stops_the_run(tmp_path: Path):
    run = Process(make_config(tmp_path, mismatch={"mean_stop": 0.01}), disk=Disk())
    run.learner.metrics = {"mismatch_mean": 0.02}
    with pytest.raises(MismatchError, match=r"by 0\.02 on average, allowed 0\.01"):
        run.run()
    assert (run.folder.metrics, run.folder.summary) == ([], None)


def test_promise_1_a_percentile_above_its_bound_raises_an_alarm(tmp_path: Path):
    alarms = {"disagreement": {"above": 0.1}}
    run = Process(make_config(tmp_path, alarms=alarms, budget={"steps": 1}), disk=Disk())
    run.learner.metrics = {"mismatch_p999": 0.2}
    assert run.run() == "finished"
    ((alarm),) = run.events("alarm")
    assert (alarm["rule"], alarm["step"], alarm["value"]) == ("disagreement", 1, 0.2)


# --- an error is not a zero


def test_promise_5_reward_errors_are_counted_and_excluded(tmp_path: Path):
    config = make_config(tmp_path, budget={"steps": 1}, rollout={"group_size": 4})
    run = Process(config, disk=Disk())
    given: list[float | None] = [1.0, 0.0, None, 1.0, 1.0, 1.0, None, None]

    async def score(inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        assert len(inputs) == len(given)
        return [
            {
                "correct": Outcome.failed("raised", f"raised {n}")
                if value is None
                else Outcome(value),
                "format": Outcome(0.0, None),
            }
            for n, value in enumerate(given, start=1)
        ]

    run.scorer.score = score  # type: ignore[method-assign]
    run.run()
    assert [rollout.reward for rollout in run.learner.seen] == given
    # Mean 2/3 and deviation sqrt(1/3) over the three that have a reward.
    high, low = 3**0.5 / 3, -2 * 3**0.5 / 3
    advantages = [rollout.advantage for rollout in run.learner.seen]
    assert advantages == pytest.approx([high, low, 0, high, 0, 0, 0, 0], abs=1e-5)
    (metrics,) = run.folder.metrics
    assert metrics["reward/mean"] == pytest.approx(4 / 5)
    assert metrics["reward/excluded_share"] == 3 / 8
    assert metrics["reward_parts/correct/error_share"] == 3 / 8
    assert metrics["reward_parts/format/error_share"] == 0
    assert metrics["groups/excluded_rollouts"] == 3
    assert (metrics["groups/mixed"], metrics["groups/all_equal"]) == (1, 1)
    assert run.folder.summary is not None
    assert run.folder.summary["faults"] == {"reward_errors": 3, "skipped_updates": 0, "restarts": 0}
    assert run.events("reward_errors") == [
        {"step": 1, "name": "correct", "count": 3, "causes": {"raised": 3}, "first": "raised 3"}
    ]
    assert run.folder.summary["samples"] == 8


# --- signals


def interrupted(config: Config, disk: Disk, on: str | int) -> Process:
    """A process that gets a signal during a call."""
    script = Script()
    script.on[on] = script.stop.set
    return process(config, disk, script)


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
    disk = Disk()
    run = interrupted(watched(tmp_path), disk, call)
    assert run.run() == "interrupted"
    assert max(disk) == steps
    adapter, meta = disk[steps]
    assert (meta["step"], meta["samples"]) == (steps, 4 * steps)
    assert [row["step"] for row in run.folder.metrics] == list(range(1, steps + 1))
    assert run.folder.summary is not None
    assert run.folder.summary["ended"] == "interrupted"
    assert run.folder.summary["steps"] == steps
    assert run.folder.summary["adapter_sha256"] in {adapter, None}
    assert run.tracker.summary["ended"] == "interrupted"
    after = run.script.calls[run.script.calls.index(call) + 1 :]
    assert [name for name in after if "generate" in name or "export" in name] == []


def test_a_signal_during_the_export_comes_too_late(tmp_path: Path):
    run = interrupted(watched(tmp_path), Disk(), "learner.export 4")
    assert run.run() == "finished"


def test_a_signal_aborts_samplers_and_abandons_scoring(tmp_path: Path):
    sampling = interrupted(
        watched(tmp_path, run={"name": "a"}), Disk(), "sampler0.generate:train 0"
    )
    sampling.run()
    assert sampling.script.calls[-2:] == ["sampler0.abort", "learner.save 0"]
    scoring = interrupted(watched(tmp_path, run={"name": "b"}), Disk(), "scorer.score")
    scoring.run()
    assert scoring.script.calls[-2:] == ["scorer.score", "learner.save 0"]


def test_a_sampler_that_does_not_stop_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "STOPPING_S", 0.0)
    run = interrupted(watched(tmp_path), Disk(), "sampler0.generate:train 0")
    monkeypatch.setattr(run.samplers[0].aborted, "set", lambda: None)
    assert run.run() == "interrupted"


def test_a_dead_sampler_does_not_prevent_the_checkpoint(tmp_path: Path):
    disk = Disk()
    run = interrupted(watched(tmp_path), disk, "sampler0.generate:train 2")

    async def gone() -> None:
        run.samplers[0].aborted.set()
        raise RuntimeError("an actor's process ended unexpectedly")

    run.samplers[0].abort = gone  # type: ignore[method-assign]
    assert run.run() == "interrupted"
    assert max(disk) == 2


# --- given the same decisions, a resumed run is the same run


def undisturbed(folder: Path) -> tuple[Process, dict[str, Any]]:
    run = process(watched(folder), Disk())
    assert run.run() == "finished"
    return run, left_behind(run.folder)


def resumed(config: Config, disk: Disk) -> Process:
    run = process(config, disk)
    assert run.run() == "finished"
    return run


def test_promise_3_a_run_interrupted_at_any_call_is_the_same_run(tmp_path: Path):
    whole, expected = undisturbed(tmp_path / "whole")
    for number, call in enumerate(whole.script.calls[:-1]):
        config, disk = watched(tmp_path / str(number)), Disk()
        first = interrupted(config, disk, number)
        assert first.run() == "interrupted", call
        saved = max(disk)
        second = resumed(config, disk)
        assert left_behind(second.folder) == expected, call
        assert second.learner.adapter == whole.learner.adapter
        assert second.folder.summary is not None
        assert second.folder.summary["resumed_from"] == saved


@pytest.mark.slow
def test_promise_3_a_run_killed_at_any_call_is_the_same_run(tmp_path: Path):
    check_same_run(
        lambda folder, disk, script: process(watched(folder), disk, script), tmp_path, hard=True
    )


@pytest.mark.slow
def test_promise_3_a_run_killed_before_any_write_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writes: list[Callable[[], None] | None] = []

    def counted(write: Callable[..., None]) -> Callable[..., None]:
        def before(*args: Any) -> None:
            if writes and (action := writes.pop(0)):
                action()
            write(*args)

        return before

    monkeypatch.setattr(run_folder, "append_row", counted(record_files.append_row))
    monkeypatch.setattr(record_files, "write_atomically", counted(record_files.write_atomically))
    _, expected = undisturbed(tmp_path / "whole")
    for number in range(1000):
        config, disk = watched(tmp_path / str(number)), Disk()
        first = process(config, disk)
        writes[:] = [None] * number + [kill]
        try:
            first.run()
        except Killed:
            assert left_behind(resumed(config, disk).folder) == expected, number
        else:
            break
    assert number > 20


def test_steps_after_the_last_checkpoint_are_trained_again(tmp_path: Path):
    config, disk = watched(tmp_path, checkpoint={"every_steps": 1}), Disk()
    first = process(config, disk, Script(on={"sampler0.generate:train 2": kill}))
    with pytest.raises(Killed):
        first.run()
    del disk[2]
    assert [row["step"] for row in first.folder.metrics] == [1, 2]
    second = process(config, disk)
    assert [row["step"] for row in second.folder.metrics] == [1]
    assert sorted(path.name for path in second.folder.rollouts.iterdir()) == [
        "step_000001.jsonl",
        "step_000002.superseded.jsonl",
        "test_before.jsonl",
        "validation_000000.jsonl",
        "validation_000002.superseded.jsonl",
    ]
    second.run()
    assert [row["step"] for row in second.folder.metrics] == [1, 2, 3, 4]


def test_the_evaluation_before_training_is_never_sampled_twice(tmp_path: Path):
    config, disk = watched(tmp_path), Disk()
    interrupted(config, disk, "learner.update 0").run()
    second = resumed(config, disk)
    tests = [n for n, call in enumerate(second.script.calls) if "generate:test" in call]
    assert tests == [len(second.script.calls) - 2]
    reserved = [entry["reason"] for entry in second.events("reserved")]
    assert reserved == ["test evaluation", *3 * ["validation evaluation"]]


@pytest.mark.parametrize(
    ("call", "saved", "drawn"),
    [
        ("sampler0.generate:train 2", 2, 1),
        ("learner.update 1", 2, 2),
        ("sampler0.generate:validation 0", 0, 3),
    ],
)
def test_a_validation_is_done_once_also_after_a_signal(
    tmp_path: Path, call: str, saved: int, drawn: int
):
    config, disk = watched(tmp_path), Disk()
    interrupted(config, disk, call).run()
    assert max(disk) == saved
    second = resumed(config, disk)
    assert second.script.calls.count("sampler0.generate:validation 0") == drawn
    evaluated = [entry["step"] for entry in second.events("evaluated")]
    assert evaluated == [0, 0, 2, 4, 4]


# --- budgets


CALLS = ("sampler0.generate:test", "sampler0.generate:train", "learner.update", "learner.export")


def test_a_budget_of_steps_ignores_the_clock(tmp_path: Path):
    run = Process(
        make_config(tmp_path), disk=Disk(), script=Script(durations=dict.fromkeys(CALLS, 1e9))
    )
    run.run()
    assert run.learner.version == 3


def test_token_records_are_written_on_demand(tmp_path: Path):
    config = make_config(tmp_path, records={"tokens": True}, budget={"steps": 1})
    run = Process(config, disk=Disk())
    run.run()
    rows = run.folder.read_rollouts("step_000001") or []
    for row, rollout in zip(rows, run.learner.seen, strict=True):
        assert row["tokens"] == rollout.completion.tokens.tolist()
        assert row["prompt_tokens"] == rollout.completion.prompt_tokens.tolist()
        assert np.array_equal(np.float32(row["logprobs"]), rollout.completion.logprobs)
    assert json.loads((run.folder.path / "summary.json").read_text())["steps"] == 1


def test_records_begin_with_the_prefix_and_trained_tokens_do_not(tmp_path: Path):
    config = watched(tmp_path, prompt={"answer_prefix": "so "})
    run = Process(config, disk=Disk(), data=make_data(validation=2))
    run.run()
    for name in ("step_000001", "validation_000002", "test_before", "test_after"):
        rows = run.folder.read_rollouts(name) or []
        assert rows
        for row in rows:
            assert row["text"].startswith("so <reasoning>")
            ended = row["stop_reason"] == "eos"
            assert row["num_tokens"] == len(row["text"].removeprefix("so ")) + ended
    for rollout in run.learner.seen:
        assert rollout.text.startswith("so ")
        assert rollout.completion.tokens[0] == ord("<")
