"""Settings that may change while a run runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.schema import Config
from configs.steering import STEERABLE, parse_value, steerable_lines, steered
from tests.fakes import make_config

VALIDATED: dict[str, Any] = {
    "data": {"validation": {"path": "v.jsonl"}},
    "eval": {"every_steps": 4},
}


def config(**tables: Any) -> Config:
    return make_config(Path("runs"), **tables)


def test_each_key_changes_its_setting_alone():
    kl = {"learner": {"kl_coef": 0.1}}
    before = config(**VALIDATED, **kl)
    assert steered(before, "learner.lr", 2e-5) == config(
        **VALIDATED, learner={"kl_coef": 0.1, "lr": 2e-5}
    )
    assert steered(before, "learner.kl_coef", 1).learner.kl_coef == 1.0
    weighted = steered(before, "rewards.functions.format.weight", -2)
    assert weighted.reward_weights == {"correct": 1.0, "format": -2.0}
    assert steered(before, "eval.every_steps", 3).eval.every_steps == 3
    timed = config(data=VALIDATED["data"], eval={"every_minutes": 1.0})
    assert steered(timed, "eval.every_minutes", 0.5).eval.every_minutes == 0.5


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        (
            "learner.lr",
            "0",
            "learner.lr = 0: must be a number, above 0 and at most 10; nearest valid: just above",
        ),
        ("learner.lr", "fast", 'learner.lr = "fast": must be a number, above 0'),
        ("learner.lr", "none", "learner.lr = none: must be a number"),
        ("learner.lrr", "1", "learner.lrr: unknown; did you mean learner.lr?"),
        ("rollout.temperature", "1", "rollout.temperature: may not change while a run runs; these"),
        (
            "learner.kl_coef",
            "0.1",
            "learner.kl_coef = 0.1: the run has no KL term, which is compil",
        ),
        ("rewards.functions.formt.weight", "1", "nearest: rewards.functions.format.weight"),
        ("rewards.functions.format.weight", "x", 'rewards.functions.format.weight = "x": must be'),
        ("eval.every_steps", "0", "eval.every_steps = 0: a running run cannot stop validating; ch"),
        ("eval.every_steps", "none", "eval.every_steps = none: a running run cannot stop valida"),
        ("eval.every_steps", "2.6", "must be an integer, at least 0; nearest valid: 3"),
        (
            "eval.every_minutes",
            "5",
            "not the interval of this run, whose kind cannot change; set ev",
        ),
    ],
)
def test_a_mistake_is_a_line_with_the_nearest_valid_value(key: str, text: str, says: str):
    with pytest.raises(ConfigError) as refused:
        steered(config(**VALIDATED), key, parse_value(text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_compiled_or_scored_ahead_stays():
    with_kl = config(learner={"kl_coef": 0.1})
    with pytest.raises(ConfigError, match=r"has a KL term, .* nearest valid: just above 0"):
        steered(with_kl, "learner.kl_coef", 0)
    ahead = config(rollout={"ahead": "one"}, learner={"importance_cap": 2.0})
    with pytest.raises(ConfigError, match=r"may not change with rollout\.ahead"):
        steered(ahead, "rewards.functions.format.weight", 1)
    with pytest.raises(ConfigError, match="the run has no validation split"):
        steered(config(), "eval.every_steps", 2)


def test_the_help_lists_every_key():
    lines = list(steerable_lines())
    assert [line.strip() for line in lines if not line.startswith("    ")] == list(STEERABLE)
    assert max(map(len, lines)) <= 100
