"""Which changed settings a resume refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.resume import (
    Change,
    altering_changes,
    change_lines,
    diff_configs,
    hardware_changes,
    hardware_id,
    is_reward_change,
)

from .conftest import load


def dump(path: Path, settings: str = "") -> dict[str, Any]:
    return load(path, settings).model_dump(mode="json")


def diff(path: Path, old: str, new: str) -> list[Change]:
    return diff_configs(dump(path, old), dump(path, new))


def altering(path: Path, old: str, new: str) -> list[Change]:
    return altering_changes(dump(path, old), dump(path, new))


def test_differences_have_both_values_in_the_order_of_the_schema(small: Path) -> None:
    assert diff(small, "", "") == []
    assert diff(small, "", "learner.lr=1e-4; lora.rank=8; budget.steps=20") == [
        ("lora.rank", 32, 8),
        ("learner.lr", 5e-5, 1e-4),
        ("budget.steps", 10, 20),
    ]


def test_tables_in_lists_are_compared_one_by_one_and_other_lists_as_a_whole(small: Path) -> None:
    new = "rewards.functions.1.weight=0.2; rewards.functions.2.name=more; .function=a:b"
    assert diff(small, "", new) == [
        ("rewards.functions.1.weight", 0.1, 0.2),
        ("rewards.functions.2.name", None, "more"),
        ("rewards.functions.2.function", None, "a:b"),
        ("rewards.functions.2.weight", None, 1.0),
        ("rewards.functions.2.on_error", None, "exclude"),
    ]
    assert diff(small, "", "plan.prompt_buckets=[8]") == [("plan.prompt_buckets", [], [8])]


@pytest.mark.parametrize(
    "change",
    [
        "budget.steps=none; .until=2030-01-01T10:00; rollout.min_prompts_per_step=1",
        "checkpoint.every_steps=3; wandb.mode=offline; records.tokens=true",
        "run.dir=/elsewhere; .mirror=s3://bucket/runs",
        "rewards.functions.0.workers=4; .timeout_s=5; .concurrency=2",
        "plan.hbm_gib=3.5; .micro_batch_tokens=768",
    ],
)
def test_settings_that_may_change_on_resume(small: Path, change: str) -> None:
    assert diff(small, "", change) != []
    assert altering(small, "", change) == []


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=1",
        "model.path=hf://a/b",
        "lora.rank=8",
        "rewards.functions.0.weight=2",
        "rollout.temperature=0.9",
        'rollout.stop_strings=["</answer>"]',
        "plan.kv_cache=int8",
        "eval.temperature=0.5",
    ],
)
def test_settings_that_alter_the_run(small: Path, change: str) -> None:
    ((key, _, _),) = altering(small, "", change)
    assert key == change.partition("=")[0].replace("functions.0", "functions.correct")


@pytest.mark.parametrize(
    ("here", "there", "is_same"),
    [
        ("model.path=/home/ann/gemma", "model.path=/home/bob/models/gemma2", True),
        ("model.path=hf://ann/gemma", "model.path=hf://bob/gemma", False),
        ("lora.start=/a/x", "lora.start=/b/x", True),
        ("lora.start=/a/x", "lora.start=/b/y", False),
        ("rewards.functions.0.function=/a/r.py:f", "rewards.functions.0.function=/b/r.py:f", True),
        ("rewards.functions.0.function=/a/r.py:f", "rewards.functions.0.function=/b/r.py:g", False),
    ],
)
def test_files_may_be_elsewhere_on_another_host(
    small: Path, here: str, there: str, is_same: bool
) -> None:
    assert (altering(small, here, there) == []) is is_same


def test_other_devices_and_sizes_are_no_other_run(small: Path) -> None:
    new = "plan.placement=colocated; .samplers=none; .sampler_devices=none; .learner_devices=2"
    old, after = dump(small), dump(small, new)
    assert altering_changes(old, after) == []
    changed = {key for key, _, _ in hardware_changes(old, after)}
    assert {"plan.placement", "plan.learner_devices"} <= changed
    assert hardware_changes(old, old) == []
    assert hardware_id(old) == hardware_id(dump(small, "learner.lr=1"))
    assert hardware_id(old) != hardware_id(after)


def test_a_longer_budget_alters_the_run_if_it_moves_the_decay(small: Path) -> None:
    linear, longer = "learner.schedule=linear", "learner.schedule=linear; budget.steps=20"
    assert altering(small, linear, longer) == [("learner.decay_steps", 10, 20)]
    assert altering(small, linear, f"{longer}; learner.decay_steps=10") == []


def test_changed_rewards_are_named_by_part_with_both_values(small: Path) -> None:
    old, new = dump(small), dump(small)
    correct, form = new["rewards"]["functions"]
    correct["args"] = {"scale": 2.0, "timeout_s": 3}
    form["weight"] = 0.5
    # The order of the parts is no change.
    new["rewards"]["functions"] = [form, correct]
    new["rewards"]["shuffle"] = True
    new["lora"]["rank"] = 8
    changes = altering_changes(old, new)
    assert sorted(one for one in changes if is_reward_change(one)) == [
        ("rewards.functions.correct.args.scale", None, 2.0),
        ("rewards.functions.correct.args.timeout_s", None, 3),
        ("rewards.functions.format.weight", 0.1, 0.5),
        ("rewards.shuffle", False, True),
    ]
    # `--accept rewards` does not cover other settings.
    refused = [one for one in changes if not is_reward_change(one)]
    assert change_lines(refused) == "  lora.rank: was 32, now 8"


def test_an_unset_metric_is_that_of_the_run(small: Path) -> None:
    assert altering(small, "eval.metric=exact_answer", "") == []
    changed = altering(small, "", "eval.metric=reward")
    assert changed == [("eval.metric", None, "reward")]
