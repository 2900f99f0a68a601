"""The training loop: what a run leaves behind, and that the sampled policy is the learned one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.colocated_actor import ColocatedActor
from pipeline.data.order import prompts_for_step
from pipeline.rollout.mismatch import MismatchError
from pipeline.types import Completion, Published, RolloutRequest
from tests.real_actor import VALIDATED, RealRun, real_config
from tests.run_process import Script
from tests.samples import changed, make_config
from tests.stub_workers import StubRun


@pytest.fixture(scope="module")
def finished(actor: ColocatedActor, tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """Four steps with a validation after every second one and a checkpoint after every third."""
    tables: dict[str, Any] = {"budget": {"steps": 4}, "checkpoint": {"every_steps": 3}}
    config = real_config(
        tmp_path_factory.mktemp("finished"), records={"tokens": True}, **VALIDATED, **tables
    )
    run = RealRun(config, actor)
    assert run.run() == "finished"
    run.worker.close()
    return run


def test_records_of_a_finished_run(finished: RealRun):
    folder = finished.folder
    assert [row["step"] for row in folder.metrics] == [1, 2, 3, 4]
    assert sorted(path.name for path in folder.rollouts.iterdir()) == [
        *(f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)),
        *("test_after.jsonl", "test_before.jsonl"),
        *(f"validation_{step:06d}.jsonl" for step in (0, 2, 4)),
    ]
    # W&B gets the same metrics of a step as metrics.jsonl.
    sent = {step: metrics for step, metrics in finished.tracker.logged if "reward/mean" in metrics}
    assert sent == {row.pop("step"): row for row in folder.metrics}
    evaluated = [(entry["name"], entry["step"]) for entry in folder.events("evaluated")]
    best = finished.summary["best"]["step"]
    assert evaluated == [
        *(("test_before", 0), ("validation", 0), ("validation", 2), ("validation", 4)),
        ("test_after", best),
    ]
    assert list(dict.fromkeys(one["step"] for one in folder.events("checkpoint"))) == [0, 3, 4]
    assert finished.script.calls[-1] == f"export {best}"


def test_each_step_trains_on_a_group_for_each_of_its_prompts(finished: RealRun):
    for step, rollouts in enumerate(finished.worker.seen):
        prompts = prompts_for_step(
            finished.data.train.prompts, seed=5, step=step, prompts_per_step=2
        )
        names = [rollout.completion.name for rollout in rollouts]
        assert [(name.step, name.prompt_id, name.sample) for name in names] == [
            (step, prompt.id, sample) for prompt in prompts for sample in range(2)
        ]
        rows = finished.folder.read_rollouts(f"step_{step + 1:06d}") or []
        for row, rollout in zip(rows, rollouts, strict=True):
            assert row["tokens"] == rollout.completion.tokens.tolist()
            assert row["prompt_tokens"] == rollout.completion.prompt_tokens.tolist()
            assert np.array_equal(np.float32(row["logprobs"]), rollout.completion.logprobs)


def test_promise_1_every_recorded_rollout_carries_version_and_hash(finished: RealRun):
    hashes = []
    for version in range(4):
        rows = finished.folder.read_rollouts(f"step_{version + 1:06d}") or []
        ((label),) = {(*row["versions"], row["adapter_sha256"]) for row in rows}
        assert label[0] == version
        hashes.append(label[1])
    trained = [row["learner/tokens_trained"] > 0 for row in finished.folder.metrics]
    assert [one != other for one, other in pairwise(hashes)] == trained[:3]


def test_promise_1_sampler_and_learner_agree_under_a_random_adapter(finished: RealRun):
    ((entry),) = finished.events("mismatch")
    assert 0 < entry["largest"] < entry["bound"] / 10
    # It is discarded: the first version that is sampled from is the initial one.
    assert finished.script.calls.index("load 0") < finished.script.calls.index("generate:test 0")


def test_promise_1_a_sampler_that_keeps_an_old_adapter_is_caught_at_the_sync(
    tmp_path: Path, actor: ColocatedActor
):
    run = RealRun(real_config(tmp_path), actor)
    load = run.worker.load

    async def stale(published: Published) -> str:
        return actor.sha256 if published.version == 1 else await load(published)

    run.worker.load = stale  # type: ignore[method-assign]
    message = r"a sampler holds adapter [0-9a-f]{12}, version 1 is [0-9a-f]{12}:"
    with pytest.raises(MismatchError, match=message):
        run.run()
    assert (run.version, run.folder.metrics) == (1, [])


def test_promise_1_a_completion_with_a_wrong_label_is_caught(tmp_path: Path, actor: ColocatedActor):
    run = RealRun(real_config(tmp_path), actor)
    generate = run.worker.generate

    async def mislabelled(requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        drawn = await generate(requests, **how)
        is_second = requests[0].name.phase == "train" and requests[0].name.step == 1
        return [changed(one, version=7) if is_second and one.name.sample else one for one in drawn]

    run.worker.generate = mislabelled  # type: ignore[method-assign]
    with pytest.raises(MismatchError, match=r"step=1.*sample=1.* was sampled by version .* publi"):
        run.run()
    assert run.version == 1


def test_promise_1_a_mean_above_its_bound_stops_the_run(tmp_path: Path, actor: ColocatedActor):
    run = RealRun(real_config(tmp_path, mismatch={"mean_stop": 0.01}), actor)
    run.worker.metrics = {"mismatch_mean": 0.02}
    with pytest.raises(MismatchError, match=r"by 0\.02 on average, allowed 0\.01"):
        run.run()
    assert (run.folder.metrics, run.folder.summary) == ([], None)


def test_temperatures_are_those_of_rollout_and_eval(tmp_path: Path, actor: ColocatedActor):
    run = RealRun(real_config(tmp_path, eval={"temperature": 0.2}, budget={"steps": 1}), actor)
    heats: dict[str, float] = {}
    generate = run.worker.generate

    async def spy(requests: Sequence[RolloutRequest], **how: Any) -> list[Completion]:
        heats[requests[0].name.phase] = how["temperature"]
        return await generate(requests, **how)

    run.worker.generate = spy  # type: ignore[method-assign]
    assert run.run() == "finished"
    run.worker.close()
    assert heats == {"probe": 0.8, "train": 0.8, "test": 0.2}  # no validation split


def test_the_summary_has_every_field_that_is_due(tmp_path: Path):
    run = StubRun(make_config(tmp_path), script=Script(durations={"learner.update": 3.0}))
    run.run()
    summary = dict(run.summary)
    rows = [row for step in (1, 2, 3) for row in run.folder.read_rollouts(f"step_{step:06d}") or ()]
    evaluation, tokens = summary.pop("eval"), sum(row["num_tokens"] for row in rows)
    assert {"time", "goodput", "speed", "cost"} <= summary.keys()  # see the tests of goodput
    assert {key: summary[key] for key in summary.keys() - {"time", "goodput", "speed", "cost"}} == {
        "ended": "finished",
        "steps": 3,
        "samples": 12,
        "tokens_generated": tokens,
        "tokens_trained": tokens,
        "tokens_padded": tokens,
        "rollouts": {"truncated": 0, "continued": 0, "dropped": 0, "unused": 0},
        "wall_s": 9.0,
        "deadline_s": None,
        "adapter_sha256": run.worker.adapter,
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
    assert {**run.tracker.summary, "eval": None} == {**run.summary, "eval": None}
