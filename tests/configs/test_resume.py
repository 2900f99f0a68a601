"""Which changed settings a resume refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.resume import Change, altering_changes, diff_configs

from .conftest import load


def diff(path: Path, old: str, new: str) -> list[Change]:
    before, after = (load(path, settings).model_dump(mode="json") for settings in (old, new))
    return diff_configs(before, after)


def altering(path: Path, old: str, new: str) -> list[Change]:
    before, after = (load(path, settings).model_dump(mode="json") for settings in (old, new))
    return altering_changes(before, after)


def test_differences_have_both_values_in_the_order_of_the_schema(small: Path) -> None:
    assert diff(small, "", "") == []
    assert diff(small, "", "learner.lr=1e-4; lora.rank=8; budget.steps=20") == [
        ("lora.rank", 32, 8),
        ("learner.lr", 1e-5, 1e-4),
        ("budget.steps", 10, 20),
    ]


def test_tables_in_lists_are_compared_one_by_one_and_other_lists_as_a_whole(small: Path) -> None:
    new = "rewards.functions.1.weight=0.2; rewards.functions.2.name=more; .function=a:b"
    added = [
        ("rewards.functions.2.name", "more"),
        ("rewards.functions.2.function", "a:b"),
        ("rewards.functions.2.weight", 1.0),
        ("rewards.functions.2.on_error", "exclude"),
        ("rewards.functions.2.concurrency", 16),
    ]
    assert diff(small, "", new) == [
        ("rewards.functions.1.weight", 0.1, 0.2),
        *((key, None, value) for key, value in added),
    ]
    assert diff(small, new, "")[1:] == [(key, value, None) for key, value in added]
    assert diff(small, "", "plan.prompt_buckets=[8]") == [("plan.prompt_buckets", [], [8])]


@pytest.mark.parametrize(
    "change",
    [
        "budget.steps=20",
        "budget.steps=none; .time=9h",
        "budget.steps=none; .until=2030-01-01T10:00; rollout.min_prompts_per_step=1",
        "checkpoint.every_steps=3; .keep=9",
        "wandb.mode=offline; .project=other",
        "records.tokens=true",
        "run.dir=/elsewhere",
        "rewards.workers=4; .timeout_s=5",
        "plan.hbm_gib=3.5",
        "plan.fixed=false",
    ],
)
def test_settings_that_may_change_on_resume(small: Path, change: str) -> None:
    assert diff(small, "", change) != []
    assert altering(small, "", change) == []


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=1",
        "run.name=other",
        "model.path=/other",
        "lora.rank=8",
        "data.train.limit=5",
        "prompt.system=Think.",
        "rewards.functions.0.weight=2",
        "rollout.temperature=0.9",
        'rollout.stop_strings=["</answer>"]',
        "plan.micro_batch_tokens=768",
        "eval.temperature=0.5",
        "parity.probe=0.1",
    ],
)
def test_settings_that_alter_the_run(small: Path, change: str) -> None:
    ((key, _, _),) = altering(small, "", change)
    assert key == change.partition("=")[0]


def test_a_longer_budget_alters_the_run_if_it_moves_the_decay(small: Path) -> None:
    linear, longer = "learner.schedule=linear", "learner.schedule=linear; budget.steps=20"
    assert altering(small, linear, longer) == [("learner.decay_steps", 10, 20)]
    assert altering(small, linear, f"{longer}; learner.decay_steps=10") == []


def test_planned_sizes_are_not_fixed_again(small: Path) -> None:
    assert altering(small, "plan.fixed=false", "") == [("plan.fixed", False, True)]
