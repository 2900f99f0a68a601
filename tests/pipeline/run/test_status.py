"""Figures of a run: the same in the line of a step, in the view and in `status.json`."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pipeline.run.status import Activity, Status, step_line

METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "reward/excluded_share": 0.125,
    "reward/errors": 2.0,
    "reward/correct": 0.375,
    "reward/format": 1.0,
    "reward_parts/correct/none_share": 0.0,
    "reward_parts/format/none_share": 0.0,
    "reward_parts/unscored/none_share": 1.0,
    "groups/mixed": 21.0,
    "groups/all_equal": 3.0,
    "rollout/entropy": 0.25,
    "rollout/tokens_mean": 27.04,
    "speed/generated_tokens_per_s": 3120.4,
    "hbm/learner/peak_gib": 1.25,
    "hbm/learner/in_use_gib": 0.75,
    "hbm/learner/planned_gib": 9.0,
    "hbm/sampler_0/peak_gib": 1.5,
    "time/step_s": 2.67,
}
STATUS = Status(
    "demo",
    "sample",
    step=42,
    steps_planned=80,
    best_validation={"step": 30, "metric": "accuracy", "value": 0.59},
    last_alarm={"step": 12, "rule": "all_equal", "text": "groups have equal rewards"},
    metrics=METRICS,
    activities=(Activity("step 43", "rollouts", 130, 256),),
    elapsed_s=1000.0,
    deadline_s=4723.0,
    expected_end=datetime(2026, 11, 23, 13, 30, tzinfo=UTC),
)


def test_the_line_of_a_step_has_all_figures_and_the_last_alarm():
    assert step_line(STATUS).split("  ") == [
        "step 42/80",
        "reward 0.500 (12.5% excluded), correct 0.375, format 1.000, errors 2",
        *("groups 21 mixed, 3 equal", "best validation 59.0% at step 30", "entropy 0.250"),
        *("length 27.0 tokens", "speed 3,120 tokens/s", "step time 2.7 s"),
        *("device memory 1.50 GiB", "budget left 1:02:03", "expected end 13:30Z"),
        "alarm all_equal at step 12",
    ]


GROUPS = {"groups/mixed": 0.0, "groups/all_equal": 0.0}


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({}, ""),
        (
            {"reward/excluded_share": 1.0, **GROUPS},
            "  reward none (100.0% excluded)  groups 0 mixed",
        ),
        (
            {"sft/loss": 1.23456, "sft/tokens_trained": 512.0, "time/step_s": 1.0},
            "  sft loss 1.2346  tokens 512  step time 1.0 s",
        ),
    ],
)
def test_what_is_not_known_is_left_out(metrics: dict[str, float], told: str):
    assert step_line(Status(metrics=metrics)).startswith(f"step 0/?{told}")
