"""Which changed settings a resume refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from configs.resume import altering_changes, diff_configs

Overrides = list[tuple[str, str]]


def resolved(path: Path, overrides: Overrides) -> dict[str, object]:
    return load_config(path, overrides).model_dump(mode="json")


def altering(path: Path, new: Overrides, old: Overrides | None = None) -> list[object]:
    return list(altering_changes(resolved(path, old or []), resolved(path, new)))


def test_equal_configurations_do_not_differ(small: Path) -> None:
    assert diff_configs(resolved(small, []), resolved(small, [])) == []


def test_differences_have_both_values_in_the_order_of_the_schema(small: Path) -> None:
    old = resolved(small, [])
    new = resolved(small, [("learner.lr", "1e-4"), ("lora.rank", "8"), ("budget.steps", "20")])
    assert diff_configs(old, new) == [
        ("lora.rank", 32, 8),
        ("learner.lr", 1e-5, 1e-4),
        ("budget.steps", 10, 20),
    ]


def test_tables_in_lists_are_compared_one_by_one(small: Path) -> None:
    old = resolved(small, [])
    new = resolved(
        small,
        [
            ("rewards.functions.1.weight", "0.2"),
            ("rewards.functions.2.name", "more"),
            ("rewards.functions.2.function", "a:b"),
        ],
    )
    added = [
        ("rewards.functions.2.name", "more"),
        ("rewards.functions.2.function", "a:b"),
        ("rewards.functions.2.weight", 1.0),
    ]
    assert diff_configs(old, new) == [
        ("rewards.functions.1.weight", 0.1, 0.2),
        *((key, None, value) for key, value in added),
    ]
    assert diff_configs(new, old)[1:] == [(key, value, None) for key, value in added]


def test_lists_of_values_are_compared_as_a_whole(small: Path) -> None:
    old, new = resolved(small, []), resolved(small, [("plan.prompt_buckets", "[8]")])
    assert diff_configs(old, new) == [("plan.prompt_buckets", [], [8])]


@pytest.mark.parametrize(
    "change",
    [
        [("budget.steps", "20")],
        [("budget.steps", "none"), ("budget.time", "9h")],
        [
            ("budget.steps", "none"),
            ("budget.until", "2030-01-01T10:00"),
            ("rollout.min_prompts_per_step", "1"),
        ],
        [("checkpoint.every_steps", "3"), ("checkpoint.keep", "9")],
        [("wandb.mode", "offline"), ("wandb.project", "other")],
        [("records.tokens", "true")],
        [("run.dir", "/elsewhere")],
        [("rewards.workers", "4"), ("rewards.timeout_s", "5")],
    ],
)
def test_settings_that_may_change_on_resume(small: Path, change: Overrides) -> None:
    assert diff_configs(resolved(small, []), resolved(small, change)) != []
    assert altering(small, change) == []


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("run.seed", "1"),
        ("run.name", "other"),
        ("model.path", "/other"),
        ("lora.rank", "8"),
        ("data.train.limit", "5"),
        ("prompt.system", "Think."),
        ("prompt.answer_prefix", "<reasoning>"),
        ("rewards.shuffle", "true"),
        ("rewards.functions.0.weight", "2"),
        ("rollout.temperature", "0.9"),
        ("rollout.stop_strings", '["</answer>"]'),
        ("learner.lr", "1e-4"),
        ("plan.micro_batch_tokens", "768"),
        ("eval.temperature", "0.5"),
        ("parity.probe", "0.1"),
    ],
)
def test_settings_that_alter_the_run(small: Path, key: str, text: str) -> None:
    assert [change[0] for change in altering(small, [(key, text)])] == [key]  # type: ignore[index]


def test_a_longer_budget_that_moves_the_decay_alters_the_run(small: Path) -> None:
    linear = [("learner.schedule", "linear")]
    longer = [*linear, ("budget.steps", "20")]
    assert altering(small, longer, old=linear) == [("learner.decay_steps", 10, 20)]


def test_a_longer_budget_with_the_old_decay_does_not_alter_the_run(small: Path) -> None:
    linear = [("learner.schedule", "linear")]
    longer = [*linear, ("budget.steps", "20"), ("learner.decay_steps", "10")]
    assert altering(small, longer, old=linear) == []


def test_memory_may_be_limited_and_sizes_planned_but_not_fixed_again(small: Path) -> None:
    fixed, free = [("plan.fixed", "true")], [("plan.fixed", "false")]
    assert altering(small, [("plan.hbm_gib", "3.5")]) == []
    assert altering(small, free, fixed) == []
    assert altering(small, fixed, free) == [("plan.fixed", False, True)]
