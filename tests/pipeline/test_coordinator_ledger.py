"""The ledger of runs with fake workers on an injected clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from configs.budget import Budget
from pipeline.rollout.workers import TrainingStopped
from pipeline.run.ledger import read_ledger
from tests.fakes import Disk, Killed, Process, Script, kill, make_config, make_data
from tests.pipeline.test_coordinator_faults import broken

DELAY_S = 5.0
SPLITS = {"train": {"path": "train.jsonl"}, "test": {"path": "test.jsonl"}}


@pytest.mark.parametrize(
    ("call", "process", "row"),
    [
        ("learner.score", "learner", "calibration"),
        ("sampler0.generate:test", "sampler 0", "evaluation"),
        ("sampler0.generate:validation", "sampler 0", "evaluation"),
        ("sampler0.generate:train", "sampler 0", "decode"),
        ("sampler0.generate:train", "learner", "waiting_samplers"),
        ("scorer.score", "driver", "waiting_rewards"),
        ("learner.update", "learner", "update"),
        ("learner.update", "sampler 0", "waiting_learner"),
        ("learner.publish", "learner", "sync"),
        ("sampler0.load", "sampler 0", "sync"),
        ("learner.save", "learner", "checkpoint"),
        ("learner.save", "sampler 0", "checkpoint"),
        ("learner.export", "learner", "export"),
        ("learner.export", "reward correct 0", "export"),
    ],
)
def test_invariant_8_a_planted_delay_is_in_its_row(tmp_path: Path, call, process, row):
    config = make_config(
        tmp_path,
        data={**SPLITS, "validation": {"path": "validation.jsonl"}},
        eval={"every_steps": 1},
        budget={"steps": 2},
    )
    script = Script(durations={call: DELAY_S})
    run = Process(config, disk=Disk(), data=make_data(validation=2), script=script)
    run.run()
    delay_s = DELAY_S * sum(name.split()[0] == call for name in script.calls)
    if row == "waiting_rewards":
        delay_s = DELAY_S * 2  # two steps; a validation's scores are in the row of evaluations
    # An adapter is also loaded within other duties.
    assert rows_of(run, process)[row] > (0.5 if "sync" in row else 0.99) * delay_s


@pytest.mark.parametrize(("call", "calls"), [("learner.save", 0), ("learner.update", 1)])
def test_the_time_to_the_first_step_ends_with_its_update(tmp_path: Path, call: str, calls: int):
    config = make_config(tmp_path, data=SPLITS, budget={"steps": 2}, checkpoint={"every_steps": 1})
    script = Script(durations={call: DELAY_S})
    run = Process(config, disk=Disk(), data=make_data(), script=script)
    run.run()
    summary = run.folder.summary
    assert summary is not None
    assert summary["ledger"]["first_step_s"] == calls * DELAY_S
    assert summary["ledger"]["wall_s"] >= 2 * DELAY_S


def rows_of(run: Process, process: str) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for one in read_ledger(run.folder.ledger):
        for row, seconds in one.seconds.get(process, {}).items():
            found[row] += seconds
    return found


def fates(run: Process) -> dict[str, int]:
    """Tokens of training by fate, of all processes of the run."""
    found = sum((Counter(one.tokens) for one in read_ledger(run.folder.ledger)), Counter[str]())
    del found["evaluation"]
    return dict(found)


MODES: list[dict[str, object]] = [
    {},
    {"cut_off": 0.5, "partial": "drop"},
    {"cut_off": 0.5, "partial": "keep"},
    {"dynamic_sampling": "capped", "max_prompts_per_step": 3},
    {"ahead": "one"},
]


@pytest.mark.parametrize("rollout", MODES)
def test_invariant_8_the_fates_of_tokens_add_up_to_what_was_generated(tmp_path: Path, rollout):
    learner = {"importance_cap": 2.0} if rollout.keys() & {"partial", "ahead"} else {}
    config = make_config(
        tmp_path,
        rollout={"group_size": 4, **rollout},
        learner=learner,
        budget={"steps": 5},
    )
    run = Process(config, disk=Disk())
    run.run()
    summary = run.folder.summary
    assert summary is not None
    found = fates(run)
    assert sum(found.values()) == summary["tokens_generated"]
    assert found["trained"] == summary["tokens_trained"]
    evaluated = [run.folder.read_rollouts(f"test_{name}") for name in ("before", "after")]
    count = sum(row["num_tokens"] for rows in evaluated for row in rows)
    assert summary["ledger"]["tokens"] == {**found, "evaluation": count}
    assert ("truncated" in found) == ("cut_off" in rollout)
    assert min(found.values()) >= 0
    assert found.get("partial", 0) == 0


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_invariant_8_tokens_of_partial_rollouts_have_one_fate_over_a_resume(tmp_path: Path, end):
    rollout = {"group_size": 4, "cut_off": 0.5, "partial": "keep"}
    config = make_config(
        tmp_path, rollout=rollout, learner={"importance_cap": 2.0}, budget={"steps": 3}
    )
    disk, script = Disk(), Script()
    first = Process(config, disk=disk, script=script)
    if end == "killed":
        script.on["sampler0.load 3"] = kill
        with pytest.raises(Killed):
            first.run()
    else:
        first.run()
        config = config.model_copy(update={"budget": Budget(steps=5)})
    second = Process(config, disk=disk)
    second.run()
    found, summary = fates(second), second.folder.summary
    assert summary is not None
    assert sum(found.values()) - found.get("repeated", 0) == summary["tokens_generated"]
    assert found["trained"] == summary["tokens_trained"]
    assert min(found.values()) >= 0
    assert found.get("partial", 0) == 0


@pytest.mark.parametrize("reason", ["an alarm", "the deadline"])
def test_invariant_8_tokens_of_a_step_without_an_update_have_a_fate(tmp_path: Path, reason):
    run = Process(make_config(tmp_path), disk=Disk())
    if reason == "an alarm":
        broken(run, {1: 4})
        with pytest.raises(TrainingStopped):
            run.run()
        fate = "repeated"
    else:
        run.coordinator.controller.may_update = lambda *_: None  # type: ignore[method-assign]
        run.run()
        fate = "stale"
    sampled = [call for call in run.script.calls if call.startswith("sampler0.generate:train")]
    assert len(sampled) == (2 if reason == "an alarm" else 1)
    assert fates(run)[fate] > 0


def test_tokens_of_rewards_that_fail_are_counted_apart(tmp_path: Path):
    run = broken(Process(make_config(tmp_path), disk=Disk()), {1: 2})
    run.run()
    rows = [row for step in (1, 2, 3) for row in run.folder.read_rollouts(f"step_{step:06d}")]
    excluded = sum(row["num_tokens"] for row in rows if row["reward"] is None)
    assert fates(run)["failed_reward"] == excluded > 0


def test_invariant_8_the_work_of_a_killed_process_is_repeated(tmp_path: Path):
    config, disk = make_config(tmp_path, budget={"steps": 4}), Disk()
    script = Script(durations={"learner.update": 5.0})

    script.on["learner.update 3"] = kill
    first = Process(config, disk=disk, script=script)
    with pytest.raises(Killed):
        first.run()
    before = fates(first)
    second = Process(config, disk=disk, script=Script(durations={"learner.update": 5.0}))
    second.run()
    # The checkpoint is of step 2: step 3 is trained again, step 4 is new.
    assert second.resumed_from == 2
    again, new = rows_of(second, "learner"), fates(second)
    assert (again["update"], again["repeated"]) == (4 * 5.0, 5.0)
    done = [second.folder.read_rollouts(f"step_{step:06d}") for step in (1, 2)]
    of_step_3 = before["trained"] - sum(row["num_tokens"] for rows in done for row in rows)
    assert new["repeated"] == of_step_3


def test_invariant_8_a_process_killed_in_its_first_duty_has_its_start_in_the_ledger(tmp_path: Path):
    run = Process(make_config(tmp_path), disk=Disk(), script=Script(on={"learner.score": kill}))
    with run.meter.ledger.phases.during("loading"):
        run.script.clock.seconds += 7.0
    with pytest.raises(Killed):
        run.run()
    for process in ("driver", "learner", "sampler 0"):
        assert rows_of(run, process) == {"loading": 7.0}
